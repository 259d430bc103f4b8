"""Engines that do not fit are refused with the reason and the remedy, before memory is taken."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from engine_folder import Machine, library_info, write_engine
from onnxruntime_plans import module

from flashnext.builder.engine_manifest import EngineManifest
from flashnext.export.errors import EngineError, FlashNextError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.plugins.tensorrt import library
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.cli.main import main
from flashnext.runtime.engines.tensorrt import fitting, opening
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.plan import MODULES, Library


def refusal(bundle: Path, kind: str = "tensorrt", **options: object) -> str:
    """What opening the bundle is refused with."""
    with pytest.raises(FlashNextError) as caught:
        LLM(bundle, engine=kind, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_without_an_engine_the_command_that_builds_one_is_said(bundle: Path, machine: Machine) -> None:
    machine()
    said = f"There is no tensorrt engine of {bundle}. Build one with: flashnext build {bundle} --engine tensorrt"
    assert refusal(bundle) == said
    assert "holds no engine (no engine.json)" in refusal(bundle, engine_path=bundle / "engines")


def test_an_engine_elsewhere_is_found_by_its_path(engine: Path, machine: Machine, tmp_path: Path) -> None:
    machine()
    moved = shutil.move(engine / "engines/tensorrt-sm90", tmp_path / "elsewhere")
    with LLM(engine, engine="tensorrt", engine_path=moved) as llm:
        assert llm.manifest.slots == 3
    machine()
    assert "holds a tensorrt engine, not one of tensorrt-rtx" in refusal(engine, "tensorrt-rtx", engine_path=moved)


def test_the_engine_for_this_gpu_is_chosen(bundle: Path, machine: Machine) -> None:
    write_engine(bundle)
    other = bundle / "engines/tensorrt-sm120"
    shutil.copytree(bundle / "engines/tensorrt-sm90", other)
    dataclasses.replace(EngineManifest.read(other), capabilities=(120,)).write(other)
    for capability, name in ((90, "sm90"), (120, "sm120")):
        machine(capability=capability)
        assert fitting.find_engine("tensorrt", bundle, capability)[0].name == f"tensorrt-{name}"
    machine(capability=86)
    assert "was built for sm_120, and this GPU is sm_86. Build it again" in refusal(bundle)


def test_an_engine_of_another_bundle_or_checkpoint_is_refused(engine: Path, machine: Machine) -> None:
    machine()
    manifest = Manifest.read(engine)
    write_engine(engine, checkpoint="0" * 64)
    assert "was built from another checkpoint" in refusal(engine)
    write_engine(engine)
    dataclasses.replace(manifest, producer="another export").write(engine)
    assert "was built from another bundle than" in refusal(engine)


def test_another_tensorrt_is_refused(engine: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr(module, "__version__", "11.5.0.1")
    said = refusal(engine)
    assert "was built by TensorRT 11.4.0.106, and 11.5.0.1 is installed" in said


def test_a_changed_plan_is_refused(engine: Path, machine: Machine) -> None:
    machine()
    plan = engine / "engines/tensorrt-sm90/body.plan"
    plan.write_bytes(plan.read_bytes().replace(b"body", b"head"))
    assert "body.plan has changed since it was built" in refusal(engine)


def test_a_plan_that_tensorrt_refuses_says_why(engine: Path, machine: Machine) -> None:
    machine()
    folder = engine / "engines/tensorrt-sm90"
    _replace_plan(folder, "head.plan", b"no plan at all")
    said = refusal(engine)
    assert "head.plan. TensorRT says: IRuntime::deserializeCudaEngine: Error Code 1: Serialization (magic tag)" in said
    assert said.endswith("Build the engine again.")


def test_a_plan_of_another_graph_is_refused(engine: Path, machine: Machine) -> None:
    """As one of another capacity is: a state or an input has another shape."""
    machine()
    folder = engine / "engines/tensorrt-sm90"
    _replace_plan(folder, "mtp_draft.plan", (folder / "mtp.plan").read_bytes())
    assert "mtp_draft.plan is not a plan of mtp_draft.onnx: it has mtp.layers.0.index_tail_state" in refusal(engine)


def test_a_plan_that_wants_values_from_the_host_is_refused(bundle: Path, machine: Machine) -> None:
    machine()
    write_engine(bundle, plan={"in_host": ["new_len"]})
    assert "head.plan is not a plan of head.onnx: it takes new_len from the host" in refusal(bundle)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("body", "profiles", 0, "ranges", "logit_rows"), None, "it says nothing of the size N, in the decode profile"),
        (("body", "profiles", 0, "ranges", "slots", "min"), [1, 1], "the range of slots"),
        (("mtp", "profiles", 0, "name"), "prefill", "the graph mtp has no decode profile"),
        (
            ("head", "profiles", 1, "ranges", "slots"),
            {"min": [3], "opt": [3], "max": [3]},
            "the ranges of B exclude one",
        ),
        (("body", "codes"), {"slots": "float8_e4m3fn"}, "slots in body cannot hold codes as float8_e4m3fn"),
        (("body", "codes"), {"x\n": "__import__"}, r"x\n in body cannot hold codes as __import__"),
    ],
)
def test_what_a_stranger_wrote_into_an_engine_is_one_sentence(
    engine: Path, machine: Machine, path: tuple[str | int, ...], value: object, said: str
) -> None:
    machine()
    file = engine / "engines/tensorrt-sm90/engine.json"
    raw = json.loads(file.read_text())
    place = raw["graphs"]
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    if path[-1] == "min":
        place |= {"opt": value, "max": value}
    file.write_text(json.dumps(raw))
    assert said in refusal(engine)


def test_an_engine_that_copies_its_states_is_refused(bundle: Path, machine: Machine) -> None:
    machine()
    state = next(iter(Manifest.read(bundle).graphs["head"].states))
    layer = {"Name": "copy", "LayerType": "Reformat", "Inputs": [{"Name": state}], "Outputs": []}
    write_engine(bundle, plan={"layers": [layer]})
    assert f"moves the state {state} in the layer copy: every" in refusal(bundle)


def test_too_little_memory_is_said_before_it_is_taken(engine: Path, machine: Machine) -> None:
    device = machine(total_bytes=1_000_000)
    said = refusal(engine)
    assert "of device memory (weights 0.00, states 0.00, plans 0.00, inputs and outputs 0.0" in said
    assert "and 0.00 GB of the host are free" in said
    assert said.endswith("--slots or less --capacity. Or keep the experts in host memory: --expert-memory host.")
    assert device.free_bytes() == 1_000_000


def test_an_engine_with_plugins_needs_the_library_that_it_was_built_with(
    engine_with_kernels: Path, machine: Machine, kernel_library: Path
) -> None:
    machine()
    module.loaded_libraries.clear()
    for _ in range(2):
        LLM(engine_with_kernels, engine="tensorrt").close()
        machine()
    assert module.loaded_libraries == [str(kernel_library)]  # once: a second time TensorRT would refuse it


def test_kernels_of_other_sources_are_left_to_the_plugins(
    engine_with_kernels: Path,
    machine: Machine,
    kernel_library: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine cannot know their parameters: it runs without kernels of its own, and says what to do."""
    monkeypatch.setattr(opening, "find_plugins", lambda *_: library_info(kernel_library, "others"))
    machine()
    with LLM(engine_with_kernels, engine="tensorrt") as llm:
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))[0].token_ids
    (said,) = [record.getMessage() for record in caplog.records]
    assert "was built from other sources than this installation's" in said
    machine()
    with pytest.raises(EngineError, match=r"without one, or with one of other sources\. Build it again"):
        LLM(engine_with_kernels, engine="tensorrt", ngram_table="pinned", ngram_gather="device")


def test_another_plugin_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one, with another one, with the one that the engine was built with."""
    monkeypatch.setenv("FLASHNEXT_PLUGINS", str(tmp_path / "none.so"))
    with pytest.raises(EngineError, match=r"needs the plugin library that it was built with\. .*none\.so is not"):
        fitting.find_plugins(tmp_path, "a" * 64, 90)
    info = library.LibraryInfo(tmp_path / "plugins.so", "b" * 64, 1, "table", "10.14", ("90",), "sources")
    monkeypatch.setattr(library, "find", lambda capability: info)
    with pytest.raises(EngineError, match=r"another plugin library \(SHA-256 aaaaaaaaaaaa…\) than .*plugins\.so \(bbb"):
        fitting.find_plugins(tmp_path, "a" * 64, 90)
    assert fitting.find_plugins(tmp_path, "b" * 64, 90) == info
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(EngineError, match=r"text\.so is not a plugin library of flashnext"):
        fitting.find_plugins(tmp_path, "b" * 64, 90, tmp_path / "text.so")


def test_the_command_line_runs_an_engine(engine: Path, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine()
    arguments = ["run", str(engine), "--token-ids", "1,2,3", "--temperature", "0", "--max-tokens", "4", "--json"]
    assert main(arguments) == 0
    wanted = json.loads(capsys.readouterr().out)["token_ids"]
    where = str(engine / "engines/tensorrt-sm90")
    found = [*arguments, "--engine", "tensorrt", "--engine-path", where, "--expert-memory", "host"]
    assert main(found) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == wanted
    assert main([*arguments, "--engine", "tensorrt-rtx"]) == 2
    assert "There is no tensorrt-rtx engine of" in capsys.readouterr().err


def test_without_tensorrt_its_package_is_said(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES["tensorrt"]:
        monkeypatch.setitem(sys.modules, name, None)
    Library.open.cache_clear()
    said = refusal(engine)
    assert said.startswith("The tensorrt engine needs TensorRT, which is not installed (")
    assert said.endswith("Install it with: pip install 'flashnext-trt[tensorrt]'")


def test_without_a_gpu_cudas_reason_is_said() -> None:
    """Through the real cuda-bindings: on a machine without a GPU or a driver."""
    pytest.importorskip("cuda.bindings.runtime")
    try:
        CudaDevice()
    except EngineError as error:
        assert str(error).startswith("The TensorRT engine needs a GPU")  # noqa: PT017
    else:
        pytest.skip("there is a GPU")


def test_options_that_other_engines_have_no_use_for_are_refused(bundle: Path) -> None:
    with pytest.raises(RequestError, match="engine_path is for the engines tensorrt and tensorrt-rtx, not for"):
        LLM(bundle, engine_path="x")
    with pytest.raises(RequestError, match="expert_memory is for the engines"):
        LLM(bundle, expert_memory="host")
    with pytest.raises(RequestError, match="expert_memory = 'disk' must be one of device, host"):
        LLM(bundle, engine="tensorrt", expert_memory="disk")
    with pytest.raises(RequestError, match="There is no option 'engine_paths'; engines have threads, engine_path"):
        LLM(bundle, engine_paths="x")


def _replace_plan(folder: Path, name: str, content: bytes) -> None:
    """Another plan, whose hash the manifest knows."""
    import hashlib

    (folder / name).write_bytes(content)
    raw = json.loads((folder / "engine.json").read_text())
    for graph in raw["graphs"].values():
        for plan in graph["plans"]:
            if plan["file"] == name:
                plan |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "engine.json").write_text(json.dumps(raw))
