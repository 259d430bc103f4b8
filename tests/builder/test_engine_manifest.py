"""The engine folder's manifest: written and read again, and refused when it is damaged or does not fit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashnext.builder.engine_manifest import (
    EngineGraph,
    EngineManifest,
    Plan,
    PluginLibrary,
    Profile,
    Range,
    bundle_identity,
    default_folder,
    read_plan,
)
from flashnext.export.errors import EngineError

CONTENT = b"a plan"


@pytest.fixture
def manifest() -> EngineManifest:
    steps = {"token_ids": Range((1, 1), (1, 1), (2, 8)), "slots": Range((1,), (1,), (2,))}
    prompts = {"token_ids": Range((1, 9), (1, 64), (1, 64)), "slots": Range((1,), (1,), (1,))}
    graph = EngineGraph(
        plans=(Plan("body.plan", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), 1.5, 1.0, 1 << 30),),
        profiles=(Profile("decode", "body.plan", 0, steps), Profile("prefill", "body.plan", 1, prompts)),
        weights=("lm_head.weight",),
        states={"layers.0.conv_state": "layers.0.conv_state_out"},
        in_place=True,
        codes={"layers.0.mlp.experts.down_proj": "int8"},
    )
    library = PluginLibrary("ab" * 32, 1, "12", "10.14", ("90a",))
    return EngineManifest("tensorrt", "11.4.0.106", (90,), "H200", "cd" * 32, "ef" * 32, {"body": graph}, library)


@pytest.fixture
def folder(manifest: EngineManifest, tmp_path: Path) -> Path:
    (tmp_path / "body.plan").write_bytes(CONTENT)
    manifest.write(tmp_path)
    return tmp_path


def test_what_is_written_is_read_again(manifest: EngineManifest, folder: Path) -> None:
    found = EngineManifest.read(folder)
    assert found == manifest
    assert read_plan(folder, found.graphs["body"].plans[0]) == CONTENT


def test_a_step_finds_its_profile(manifest: EngineManifest) -> None:
    graph = manifest.graphs["body"]
    found = [graph.profile_for({"token_ids": shape}) for shape in [(1, 1), (2, 8), (1, 9), (2, 9), (3, 1), (1, 65)]]
    assert [p and p.name for p in found] == ["decode", "decode", "prefill", None, None, None]


def test_a_plan_that_has_changed_is_refused(folder: Path) -> None:
    plan = EngineManifest.read(folder).graphs["body"].plans[0]
    for content, sentence in ((b"a plaN", "has changed"), (b"longer plan", "11 bytes long, and was built with 6")):
        (folder / "body.plan").write_bytes(content)
        with pytest.raises(EngineError, match=sentence):
            read_plan(folder, plan)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.pop("kind"), "is damaged"),
        (lambda m: m.update(format_version=9), "format version 9, this release reads 1"),
        (lambda m: m.update(format_version=True), "format version True, this release reads 1"),
        (lambda m: m.update(kind="onnx"), "its kind is 'onnx'"),
        (lambda m: m.update(tensorrt="eleven"), "'eleven' is not a version"),
        (lambda m: m.update(tensorrt="11.²"), "is not a version"),
        (lambda m: m.update(tensorrt="11." + "4" * 5000), "is not a version"),
        (lambda m: m.update(golden_check="maybe"), "golden check is 'maybe'"),
        (lambda m: m.update(capabilities=[]), "no compute capability"),
        (lambda m: m["graphs"]["body"]["plans"][0].update(file="../body.plan"), "lie in its own folder"),
        (lambda m: m["graphs"]["body"]["plans"][0].update(file="head.plan"), "lacks head.plan"),
        (lambda m: m["graphs"]["body"]["plans"][0].update(bytes=-1), "is damaged"),
        (lambda m: m["graphs"]["body"]["profiles"][0].update(plan="head.plan"), "profile 'decode' of the plan"),
        (lambda m: m["graphs"]["body"].update(profiles=[]), "has no profile"),
        (lambda m: m["graphs"]["body"]["profiles"][0]["ranges"]["slots"].update(opt=[9]), "the range of slots"),
        (lambda m: m["graphs"]["body"]["profiles"][0]["ranges"]["slots"].update(min=[0]), "the range of slots"),
    ],
)
def test_a_damaged_manifest_is_one_sentence(folder: Path, change: Callable[[Any], object], sentence: str) -> None:
    raw = json.loads((folder / "engine.json").read_text())
    change(raw)
    (folder / "engine.json").write_text(json.dumps(raw))
    with pytest.raises(EngineError, match=sentence) as caught:
        EngineManifest.read(folder)
    assert "Build the engine again" in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "plan"
    elsewhere.write_bytes(CONTENT)
    (folder / "body.plan").unlink()
    (folder / "body.plan").symlink_to(elsewhere)
    with pytest.raises(EngineError, match="a link that leaves"):
        EngineManifest.read(folder)


def test_a_folder_without_an_engine_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="flashnext build BUNDLE"):
        EngineManifest.read(tmp_path)


def test_an_engine_of_another_bundle_is_refused(manifest: EngineManifest, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(EngineError, match="another bundle"):
        manifest.check_bundle(tmp_path, "engines/x")
    dataclasses.replace(manifest, bundle=bundle_identity(tmp_path)).check_bundle(tmp_path, "engines/x")


def test_an_engine_of_another_tensorrt_is_refused(manifest: EngineManifest) -> None:
    manifest.check_version("11.4.0.106", "engines/x")
    with pytest.raises(EngineError, match=r"built by TensorRT 11\.4\.0\.106, and 11\.5\.0\.1 is installed"):
        manifest.check_version("11.5.0.1", "engines/x")
    portable = dataclasses.replace(manifest, version_compatible=True)
    portable.check_version("11.5.0.1", "engines/x")
    for version in ("11.3.0.1", "12.0.0.1"):
        with pytest.raises(EngineError, match="cannot load"):
            portable.check_version(version, "engines/x")


def test_an_engine_for_another_gpu_is_refused(manifest: EngineManifest) -> None:
    manifest.check_capability(90, "engines/x")
    for capability in (89, 100):
        with pytest.raises(EngineError, match=f"built for sm_90, and this GPU is sm_{capability}"):
            manifest.check_capability(capability, "engines/x")
    dataclasses.replace(manifest, hardware_compatible=True).check_capability(100, "engines/x")


def test_the_default_folder_names_kind_and_target() -> None:
    assert default_folder("bundle", "tensorrt-rtx", (89, 120)) == Path("bundle/engines/tensorrt-rtx-sm89-sm120")
