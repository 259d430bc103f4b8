"""Checkpoints as the Hugging Face hub caches them: a snapshot of links into `blobs/`, at a path that may move."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from flashnext.export.checkpoint import Checkpoint, identity
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.shards import INDEX_NAME
from flashnext.export.errors import BundleError, CheckpointError, EngineError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.main import main
from flashnext.runtime.model_runner import ModelRunner, open_checkpoint
from flashnext.runtime.weights import load_weights


def make_cache(checkpoint: Path, root: Path) -> Path:
    """The hub's layout: `models--x/snapshots/<revision>/` of relative links into `blobs/`; returns the snapshot."""
    snapshot, blobs = root / "models--x--y/snapshots/0123abcd", root / "models--x--y/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        blob = blobs / f"{number:064x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, to be exported quickly."""
    return write_random_checkpoint(tmp_path_factory.mktemp("plain"), {"num_hidden_layers": 2}, mtp=False)


@pytest.fixture(scope="module")
def snapshot(checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(checkpoint_folder, tmp_path_factory.mktemp("hub"))


def test_real_paths_below_a_common_parent(snapshot: Path, checkpoint_folder: Path) -> None:
    checkpoint = Checkpoint.open(snapshot)
    blobs = snapshot.parents[1] / "blobs"
    assert checkpoint.common_parent == blobs.resolve()
    assert {t.file.parent for t in checkpoint.tensors.values()} == {blobs.resolve()}
    assert identity(snapshot) == identity(checkpoint_folder)


@pytest.fixture(scope="module")
def bundle(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "bundle"
    export_bundle(snapshot, target, ExportOptions(capacity=64, slots=1))
    return target


def test_exports_and_runs(bundle: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(bundle / "body.onnx", load_external_data=False)
    external = [t.external_data for t in model.graph.initializer if t.external_data]
    locations = {entry.value for data in external for entry in data if entry.key == "location"}
    assert locations <= {b.name for b in (snapshot.parents[1] / "blobs").iterdir()}
    assert main(["run", str(bundle), "--prompt", "The rain", "--max-tokens", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out


def test_the_same_weights_wherever_they_lie(bundle: Path, snapshot: Path, checkpoint_folder: Path) -> None:
    manifest = Manifest.read(bundle)
    here, there = (load_weights(manifest, open_checkpoint(manifest, f)) for f in (snapshot, checkpoint_folder))
    for name, weight in here.items():
        np.testing.assert_array_equal(weight, there[name])


def test_a_copy_with_other_file_names(bundle: Path, checkpoint_folder: Path) -> None:
    """ONNX Runtime finds weights by file names, and says what to do; the PyTorch engine does not need them."""
    with pytest.raises(EngineError, match=r"files have other names .* Export the bundle again"):
        ModelRunner.open(bundle, checkpoint=checkpoint_folder)
    ModelRunner.open(bundle, "torch:reference", checkpoint=checkpoint_folder).close()


def test_moved_checkpoint_names_the_option(bundle: Path, snapshot: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(bundle)
    moved = shutil.copytree(snapshot.parents[1], tmp_path / "moved", symlinks=True) / "snapshots" / snapshot.name
    gone = dataclasses.replace(manifest, checkpoint=dataclasses.replace(manifest.checkpoint, path="/gone"))
    with pytest.raises(BundleError, match=r"not at /gone\. .*--checkpoint FOLDER"):
        open_checkpoint(gone)
    assert open_checkpoint(gone, moved).tensors.keys() == open_checkpoint(manifest).tensors.keys()


def test_changed_checkpoint_is_noticed_when_the_bundle_is_opened(
    bundle: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(checkpoint_folder, tmp_path / "copy"))
    shard = copy / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BundleError, match=r"is not the one that the bundle was made from.*export the bundle again"):
        ModelRunner.open(bundle, checkpoint=copy)
    shard.write_bytes(content[:-1])
    with pytest.raises(BundleError, match="is not the one"):
        ModelRunner.open(bundle, checkpoint=copy)
    (copy / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="Download the index too"):
        ModelRunner.open(bundle, checkpoint=copy)
