"""Sparse checkpoints of the official sizes: sound to the reader, and nearly nothing on the disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.ngram_constants import derive
from flashnext.export.checkpoint.official_config import OFFICIAL_TEXT_CONFIG
from flashnext.export.checkpoint.sparse_checkpoint import LAYOUTS, main, write_sparse_checkpoint


def disk_bytes(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.iterdir())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_full_sizes_without_the_bytes(layout: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_sparse_checkpoint(tmp_path, layout=layout, layers=2))
    config = checkpoint.config
    assert (config.num_hidden_layers, config.hidden_size) == (2, OFFICIAL_TEXT_CONFIG["hidden_size"])
    assert sum(t.length for t in checkpoint.tensors.values()) > 20e9
    assert disk_bytes(tmp_path) < 30e6
    assert checkpoint.ngram_spec(1).head_sizes == derive(config, 1).head_sizes


def test_parameters_of_the_whole_model(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_sparse_checkpoint(tmp_path))
    sizes = {name: math.prod(t.shape) for name, t in checkpoint.tensors.items()}
    table = sum(n for name, n in sizes.items() if "ngram_embedding" in name)
    assert table == 320_001_536 * 160
    assert sum(n for name, n in sizes.items() if ".mlp.experts." in name) == (48 + 1) * 512 * 3 * 640 * 2560


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "new"), "--layers", "4"])
    assert "GB apparent" in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "new").config.num_hidden_layers == 4
