"""Golden files hold what was run: read back by this project and by Polygraphy; others are refused with one sentence."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from polygraphy.comparator import RunResults
from polygraphy.json import load_json

from flashnext.export.errors import GoldenError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.golden.folder import Golden, file_of
from flashnext.runtime.golden.write import GoldenOptions, Written, write_golden
from flashnext.runtime.validation.validator import SeededSteps, validate


@pytest.fixture(scope="module")
def manifest(random_bundle: Path) -> Manifest:
    return Manifest.read(random_bundle)


def test_polygraphy_and_this_project_read_the_same(written: Written, manifest: Manifest) -> None:
    golden = Golden.open(written.folder, manifest)
    for graph, spec in manifest.graphs.items():
        for number, (feed, out) in enumerate(zip(golden.feeds(graph), golden.outputs(graph), strict=True)):
            (theirs,) = load_json(str(file_of(written.folder, graph, "inputs", number)))
            assert set(theirs) == {t.name for t in spec.inputs if t.role != "weight"}
            assert all(np.array_equal(theirs[name], feed[name]) for name in feed)
            ((name, (result,)),) = RunResults.load(str(file_of(written.folder, graph, "outputs", number)))
            assert name == "pytorch"
            assert {t.name for t in spec.outputs} < set(result)
            assert all(np.array_equal(result[name], out[name]) for name in out)


def test_states_of_a_step_are_those_before_the_next(written: Written, manifest: Manifest) -> None:
    """But for the rows that nobody reads, which are NaN."""
    spec = manifest.graphs["body"]
    steps = Golden.open(written.folder, manifest).steps("body")
    for number in range(len(steps) - 1):
        results = RunResults.load(str(file_of(written.folder, "body", "outputs", number)))
        (following,) = load_json(str(file_of(written.folder, "body", "inputs", number + 1)))
        for state, out in spec.states.items():
            after, before = results[0][1][0][out], following[state]
            read = ~np.isnan(after)
            assert np.array_equal(after[read], before[read])
            assert np.isnan(after[-1]).all()
            assert np.abs(after[read]).max() > 0 or state.endswith("pending_state")


def test_raw_inputs_are_the_same_bytes(written: Written, manifest: Manifest) -> None:
    (inputs,) = load_json(str(file_of(written.folder, "mtp", "inputs", 3)))
    for name, array in inputs.items():
        assert (written.folder / "mtp/raw/after_verify" / f"{name}.bin").read_bytes() == array.tobytes()


def test_steps_have_no_padding(manifest: Manifest) -> None:
    source = SeededSteps(manifest, 0, 0, ragged=False)
    assert all(step.valid.all() for graph in manifest.graphs for step in source.steps_of(graph))


@pytest.mark.slow
def test_bfloat16_travels_as_tensors(random_checkpoint: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    manifest = export_bundle(random_checkpoint, bundle, ExportOptions(capacity=64, slots=2, dtype="bfloat16"))
    write_golden(bundle, tmp_path / "golden", GoldenOptions(copy_weights=True))
    (inputs,) = load_json(str(file_of(tmp_path / "golden", "body", "inputs", 1)))
    assert str(inputs["r"].dtype) == "torch.bfloat16"
    report = validate(bundle, "torch:reference", golden=tmp_path / "golden")
    assert report.passed
    assert max(row.max_error for row in report.rows) == 0
    assert manifest.dtype == "bfloat16"


# --- refusals -------------------------------------------------------------------------------------


def test_room_is_looked_for_before_anything_is_written(
    random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    said: list[str] = []
    with pytest.raises(GoldenError, match=r"need .* MiB at .*, where 1.00 MiB are free. Make room"):
        write_golden(random_bundle, tmp_path / "golden", GoldenOptions(copy_weights=True), note=said.append)
    assert "MiB of inputs and outputs" in said[0]
    assert list(tmp_path.iterdir()) == []


def test_states_too_large_for_json(random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashnext.runtime.golden.recorder.MOST_STEP_BYTES", 1 << 16)
    with pytest.raises(GoldenError, match="smaller --capacity and fewer --slots"):
        write_golden(random_bundle, tmp_path / "golden")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_no_graphs_beside_the_checkpoint(
    random_bundle: Path, random_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    before = sorted(random_checkpoint.iterdir())
    monkeypatch.setattr("flashnext.runtime.golden.write._write_facts", fail)
    with pytest.raises(KeyboardInterrupt):
        write_golden(random_bundle, tmp_path / "golden")
    assert list(tmp_path.iterdir()) == []
    assert sorted(random_checkpoint.iterdir()) == before


def test_options_that_contradict_one_another(random_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="choose one"):
        write_golden(random_bundle, tmp_path / "g", GoldenOptions(weights_as_inputs=True, copy_weights=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(GoldenError, match="is a file"):
        write_golden(random_bundle, tmp_path / "file")
    with pytest.raises(GoldenError, match="files that are not golden files"):
        write_golden(random_bundle, tmp_path)


Facts = dict[str, Any]


def _of_step(facts: Facts, **changes: object) -> None:
    facts["steps"]["body"][1].update(changes)


DAMAGES: list[tuple[Callable[[Facts], object], str]] = [
    (lambda f: f.update(format_version=2), "has format version 2"),
    (lambda f: f.update(capacity=99), "written for a bundle with capacity = 99"),
    (lambda f: f["steps"].pop("head"), "is damaged"),
    (lambda f: f.pop("per_layer"), "is damaged"),
    (lambda f: _of_step(f, new_len=[9, 9]), "lengths that no slot holds"),
    (lambda f: _of_step(f, past_len=[-1, 0]), "lengths that no slot holds"),
    (lambda f: _of_step(f, past_len=[10**9, 0]), "lengths that no slot holds"),
    (lambda f: _of_step(f, new_len=["1", 1]), "expected a whole number"),
    (lambda f: _of_step(f, new_len=[1] * 400, past_len=[1] * 400, accepted=[0] * 400), "rows"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[m for _, m in DAMAGES])
def test_damaged_facts(
    written: Written, manifest: Manifest, tmp_path: Path, damage: Callable[[Facts], object], message: str
) -> None:
    facts = json.loads((written.folder / "golden.json").read_text())
    damage(facts)
    (tmp_path / "golden.json").write_text(json.dumps(facts))
    with pytest.raises(GoldenError, match=message):
        Golden.open(tmp_path, manifest)


def npy(array: np.ndarray[Any, Any]) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def _changed(values: dict[str, Any], name: str, value: object) -> None:
    values[name] = value


WRONG_ARRAYS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda v: v.pop("token_ids"), "lacks something"),
    (lambda v: _changed(v, "token_ids", [1, 2]), "has no array for token_ids"),
    (lambda v: _changed(v, "token_ids", {"array": "!"}), "has no array for token_ids"),
    (lambda v: _changed(v, "token_ids", npy(np.zeros((2, 25), np.int32))), r"\(2, 25\).*expected int32 \[2, 24\]"),
    (lambda v: _changed(v, "token_ids", npy(np.zeros((2, 24), np.int64))), "<i8.*expected int32"),
    (lambda v: _changed(v, "token_ids", npy(np.full((2, 24), 10**6, np.int32))), "token_ids outside"),
    (lambda v: _changed(v, "slots", npy(np.array([7, 0], np.int32))), "slots outside"),
    (lambda v: _changed(v, "slots", npy(np.array([1, 1], np.int32))), "slots that are not distinct"),
    (lambda v: _changed(v, "past_len", npy(np.array([1, 1], np.int32))), "past_len that differs"),
]


@pytest.mark.parametrize(("damage", "message"), WRONG_ARRAYS, ids=[m for _, m in WRONG_ARRAYS])
def test_wrong_arrays(
    written: Written, manifest: Manifest, tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    """An engine would read and write where they say."""
    folder = tmp_path / "golden"
    shutil.copytree(written.folder, folder, ignore=shutil.ignore_patterns("raw", "body", "*.onnx", "*.safetensors"))
    path = file_of(folder, "head", "inputs", 0)
    content = json.loads(path.read_text())
    damage(content[0])
    path.write_text(json.dumps(content))
    with pytest.raises(GoldenError, match=message):
        Golden.open(folder, manifest).feeds("head")


def test_a_header_that_promises_more_than_there_is(written: Written, manifest: Manifest, tmp_path: Path) -> None:
    """No memory is taken for what a header says."""
    folder = tmp_path / "golden"
    shutil.copytree(written.folder, folder, ignore=shutil.ignore_patterns("raw", "body", "*.onnx", "*.safetensors"))
    path = file_of(folder, "head", "inputs", 0)
    content = json.loads(path.read_text())
    data = base64.b64decode(npy(np.zeros((2, 24), np.int32))["array"]).replace(b"(2, 24), ", b"(1<<40,),")
    content[0]["token_ids"]["array"] = base64.b64encode(data.replace(b"1<<40", b"99999")).decode()
    path.write_text(json.dumps(content))
    with pytest.raises(GoldenError, match="has no array for token_ids"):
        Golden.open(folder, manifest).feeds("head")


def test_a_file_larger_than_its_arrays(written: Written, manifest: Manifest, tmp_path: Path) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(written.folder, folder, ignore=shutil.ignore_patterns("raw", "body", "*.onnx", "*.safetensors"))
    path = file_of(folder, "head", "inputs", 0)
    with path.open("ab") as stream:
        stream.truncate(64 << 20)
    with pytest.raises(GoldenError, match="more than the"):
        Golden.open(folder, manifest).feeds("head")


@pytest.mark.parametrize("link", ["golden.json", "head", "head/inputs", "head/inputs/0000000000.json"])
def test_links_inside_the_folder_are_not_followed(
    written: Written, manifest: Manifest, tmp_path: Path, link: str
) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(written.folder, folder, ignore=shutil.ignore_patterns("raw", "body", "*.onnx", "*.safetensors"))
    (folder / link).rename(tmp_path / "elsewhere")
    (folder / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GoldenError, match=f"{link} is a symbolic link"):
        Golden.open(folder, manifest).feeds("head")
    (tmp_path / "way").symlink_to(written.folder, target_is_directory=True)
    assert Golden.open(tmp_path / "way", manifest).feeds("head")  # a link to the folder is the user's own


def test_fp8_residual_is_refused(random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest.read(random_bundle)
    coded = [dataclasses.replace(t, dtype="float8_e4m3fn" if t.name == "r" else t.dtype)
             for t in manifest.graphs["body"].inputs]  # fmt: skip
    body = dataclasses.replace(manifest.graphs["body"], inputs=tuple(coded))
    changed = dataclasses.replace(manifest, graphs={**manifest.graphs, "body": body})
    monkeypatch.setattr(Manifest, "read", lambda _: changed)
    with pytest.raises(GoldenError, match="--residual plain"):
        write_golden(random_bundle, tmp_path / "golden")


def test_damaged_files_end_with_one_sentence(written: Written, manifest: Manifest, tmp_path: Path) -> None:
    """Bytes changed, cut out and put in at random places: an array of the right size may be another one, no more."""
    random = np.random.default_rng(0)
    names = ("golden.json", "head/inputs/0000000001.json", "head/outputs/0000000001.json")
    shutil.copytree(written.folder / "head", tmp_path / "head")
    sound = {name: (written.folder / name).read_bytes() for name in names}
    refused: list[str] = []
    for case in range(120):
        for name in names:
            (tmp_path / name).write_bytes(sound[name])
        name = names[case % 3]
        place, length = random.integers(0, min(len(sound[name]), 3000)), random.integers(0, 20)
        inserted = random.integers(0, 256, random.integers(0, 20), np.uint8).tobytes()
        (tmp_path / name).write_bytes(sound[name][:place] + inserted + sound[name][place + length :])
        try:
            golden = Golden.open(tmp_path, manifest)
            golden.feeds("head")
            golden.outputs("head", sites=True)
        except GoldenError as error:
            refused.append(str(error))
    assert len(refused) > 90
    assert not [message for message in refused if "\n" in message]
