"""Graphs beside a checkpoint: folders of one name keep theirs apart, and a folder written again leaves none behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.golden.placing import Placing
from flashnext.runtime.golden.write import GoldenOptions


def test_graphs_of_two_folders(random_bundle: Path, random_checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))
    manifest, checkpoint = Manifest.read(random_bundle), Checkpoint.open(folder)
    before = set(folder.iterdir())
    work = tmp_path / "work"
    work.mkdir()

    def write(name: str, **options: bool) -> set[Path]:
        """Place the graphs of a golden folder; those beside the checkpoint afterwards."""
        placing = Placing.plan(random_bundle, tmp_path / name, manifest, checkpoint, GoldenOptions(**options))
        with placing.written(work):
            pass
        return set(folder.iterdir()) - before

    first = write("a/golden")
    both = write("b/golden")
    assert len(both) == 2 * len(first)
    assert first < both
    assert write("a/golden") == both
    assert write("a/golden", copy_weights=True) == both - first
