"""Identity: the same wherever a checkpoint lies, another as soon as anything that counts has changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext.export.checkpoint import identity
from flashnext.export.checkpoint.identity import WHOLE_BYTES
from flashnext.export.checkpoint.shards import INDEX_NAME
from flashnext.export.errors import CheckpointError


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte[0] ^ 1]))


def test_moving_does_not_change_it(random_checkpoint: Path, sharded_folder: Path) -> None:
    assert identity(sharded_folder) == identity(random_checkpoint)
    assert len(identity(sharded_folder)) == 64


@pytest.mark.parametrize("position", [20, 500_000, 1_000_000])
def test_any_byte_of_a_small_shard_counts(random_checkpoint: Path, sharded_folder: Path, position: int) -> None:
    flip(sharded_folder / "model-00001-of-00002.safetensors", position)
    assert identity(sharded_folder) != identity(random_checkpoint)


def test_configuration_and_index_count(
    random_checkpoint: Path, sharded_folder: Path, edit_json: Callable[..., None]
) -> None:
    edit_json(sharded_folder / INDEX_NAME, lambda i: i.update(metadata={}))
    second = identity(sharded_folder)
    edit_json(sharded_folder / "config.json", lambda c: c.update(comment=1))
    assert len({identity(random_checkpoint), second, identity(sharded_folder)}) == 3


def test_large_shards_are_sampled(tmp_path: Path, checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(4 * WHOLE_BYTES)
    before = identity(checkpoint_folder)
    copy = Path(shutil.copytree(checkpoint_folder, tmp_path / "copy"))
    flip(copy / "model.safetensors", 4 * WHOLE_BYTES - 1)
    assert identity(copy) != before
    with file.open("r+b") as stream:
        stream.truncate(4 * WHOLE_BYTES - 1)
    assert identity(checkpoint_folder) != before


def test_unreadable(checkpoint_folder: Path) -> None:
    (checkpoint_folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        identity(checkpoint_folder)
    (checkpoint_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        identity(checkpoint_folder)
