"""`--beside`: graphs next to the shards, where the tools of ONNX find the external data by themselves."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from flashnext.export.errors import BundleError
from flashnext.export.graphs.beside import beside_path, write_beside
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest


@pytest.fixture
def checkpoint(random_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))


def added(checkpoint: Path) -> set[Path]:
    return {file for file in checkpoint.iterdir() if file.suffix not in (".json", ".safetensors", ".jinja")}


def test_bfloat16_bundle_and_its_graphs_beside_the_shards(checkpoint: Path, tmp_path: Path) -> None:
    """ONNX Runtime cannot run them on a CPU, so the checker is what says that they are sound."""
    bundle = tmp_path / "bundle"
    options = ExportOptions(capacity=64, slots=2, dtype="bfloat16", beside=True)
    manifest = export_bundle(checkpoint, bundle, options)
    assert Manifest.read(bundle) == manifest
    written = {beside_path(manifest, bundle, name) for name in manifest.graphs}
    assert added(checkpoint) == written
    for path in written:
        onnx.checker.check_model(path, full_check=True)


def test_onnx_runtime_opens_them_by_name(checkpoint: Path, random_bundle: Path) -> None:
    manifest = Manifest.read(random_bundle)
    place = dataclasses.replace(manifest.checkpoint, common_parent=str(checkpoint))
    written = write_beside(random_bundle, dataclasses.replace(manifest, checkpoint=place))
    assert added(checkpoint) == set(written)
    for path, graph in zip(written, manifest.graphs.values(), strict=True):
        onnx.checker.check_model(path, full_check=True)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert {port.name for port in session.get_inputs()} == {tensor.name for tensor in graph.inputs}


def test_bundles_of_one_name_keep_their_graphs_apart(checkpoint: Path, random_bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(random_bundle)
    place = dataclasses.replace(manifest.checkpoint, common_parent=str(checkpoint))
    here = dataclasses.replace(manifest, checkpoint=place)
    bundles = [Path(shutil.copytree(random_bundle, tmp_path / above / "bundle")) for above in "ab"]
    first, second = (write_beside(bundle, here) for bundle in bundles)
    assert added(checkpoint) == {*first, *second}
    assert not {*first} & {*second}
    without_drafts = dataclasses.replace(here, graphs={n: g for n, g in here.graphs.items() if "mtp" not in n})
    again = write_beside(bundles[0], without_drafts)
    assert added(checkpoint) == {*again, *second}


def test_a_place_that_is_taken_is_told(checkpoint: Path, random_bundle: Path) -> None:
    manifest = Manifest.read(random_bundle)
    here = dataclasses.replace(
        manifest, checkpoint=dataclasses.replace(manifest.checkpoint, common_parent=str(checkpoint))
    )
    taken = beside_path(here, random_bundle, next(iter(here.graphs)))
    taken.mkdir()
    with pytest.raises(BundleError, match=r"graphs cannot be written to .* The bundle itself is whole"):
        write_beside(random_bundle, here)
    assert added(checkpoint) == {taken}


def test_graphs_hold_no_paths_of_the_exporting_machine(random_bundle: Path) -> None:
    """torch.onnx notes where in which source file each node was traced."""
    for graph in Manifest.read(random_bundle).graphs.values():
        content = (random_bundle / graph.file).read_bytes()
        assert b".py" not in content
        assert str(Path(onnx.__file__).parents[1]).encode() not in content
