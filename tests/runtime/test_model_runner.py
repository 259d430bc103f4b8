"""Finding a bundle's checkpoint: where it was, where the user says, and never another one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flashnext.export.checkpoint.identity import identity
from flashnext.export.errors import BundleError, EngineError
from flashnext.export.graphs.manifest import CheckpointRef, Manifest
from flashnext.runtime.model_runner import ModelRunner, open_checkpoint

MakeManifest = Callable[..., Manifest]


def manifest_of(make_manifest: MakeManifest, checkpoint: Path) -> Manifest:
    return make_manifest(checkpoint=CheckpointRef(str(checkpoint), identity(checkpoint), str(checkpoint)))


def test_the_checkpoint_is_found_where_the_bundle_says(make_manifest: MakeManifest, random_checkpoint: Path) -> None:
    assert open_checkpoint(manifest_of(make_manifest, random_checkpoint)).folder == random_checkpoint


def test_a_moved_checkpoint_is_found_by_the_option(
    make_manifest: MakeManifest, random_checkpoint: Path, tmp_path: Path
) -> None:
    manifest = make_manifest(checkpoint=CheckpointRef("/gone", identity(random_checkpoint), "/gone"))
    with pytest.raises(BundleError, match=r"not at /gone.*checkpoint=FOLDER \(--checkpoint FOLDER\)"):
        open_checkpoint(manifest)
    moved = shutil.copytree(random_checkpoint, tmp_path / "moved")
    assert open_checkpoint(manifest, moved).folder == moved


def test_other_ngram_constants_are_refused(random_bundle: Path, tmp_path: Path) -> None:
    """Rows of other numbers would be read, and nothing else would show it."""
    bundle = shutil.copytree(random_bundle, tmp_path / "bundle")
    manifest = Manifest.read(bundle)
    ngram = dataclasses.replace(manifest.ngrams[0], multipliers=(1, 3, 5))
    dataclasses.replace(manifest, ngrams=(ngram, *manifest.ngrams[1:])).write(bundle)
    with pytest.raises(BundleError, match="does not describe the n-gram table of layer 1"):
        ModelRunner.open(bundle, threads=1)


@pytest.mark.parametrize(("graph", "content"), [("body", "mtp"), ("head", "body"), ("mtp", None)])
def test_a_damaged_or_exchanged_graph_is_refused(
    random_bundle: Path, tmp_path: Path, graph: str, content: str | None
) -> None:
    bundle = shutil.copytree(random_bundle, tmp_path / "bundle")
    data = (bundle / f"{content}.onnx").read_bytes() if content else b"no graph" * 99
    (bundle / f"{graph}.onnx").write_bytes(data)
    with pytest.raises(EngineError, match=rf"{graph}\.onnx.*Export the bundle again"):
        ModelRunner.open(bundle, threads=1)


def test_a_changed_checkpoint_is_refused(make_manifest: MakeManifest, random_checkpoint: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(random_checkpoint, tmp_path / "changed")
    manifest = manifest_of(make_manifest, changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"seed": 5}))
    with pytest.raises(BundleError, match=r"not the one that the bundle was made from.*--checkpoint"):
        open_checkpoint(manifest)
