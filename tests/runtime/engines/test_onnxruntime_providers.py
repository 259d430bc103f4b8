"""Execution providers of ONNX Runtime: what is asked for, what is here, and what the engine does with them.

A GPU is not needed: the device's side is tried with memory of the CPU that takes the same calls.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest

from flashnext.export.errors import EngineError, FlashNextError, PluginError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.plugins.tensorrt import library
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.cli.engine_options import provider
from flashnext.runtime.cli.main import main
from flashnext.runtime.engines import onnxruntime_engine, onnxruntime_providers
from flashnext.runtime.engines.onnxruntime_providers import CPU, CUDA, TENSORRT, TENSORRT_RTX, Memory, Providers
from flashnext.runtime.validation.validator import validate

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def all_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the installed ONNX Runtime had the providers of a GPU."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])


# --- the list -------------------------------------------------------------------------------------


def test_names_and_pairs() -> None:
    assert Providers.of(None).entries == ((CPU, {}),)
    assert Providers.of([]).entries == ((CPU, {}),)
    assert Providers.of([(CPU, {"use_arena": False})]).entries == ((CPU, {"use_arena": "False"}),)
    assert Providers.of([[CPU, {}]]).entries == ((CPU, {}),)


@pytest.mark.usefixtures("all_available")
def test_device_and_form_follow_from_the_list(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.touch()
    cuda = Providers.of([(CUDA, {"device_id": 1}), CPU])
    assert (cuda.device, cuda.uses_plugins) == (("cuda", 1), False)
    tensorrt = Providers.of([(TENSORRT, {"trt_extra_plugin_lib_paths": str(file)}), CUDA])
    assert (tensorrt.device, tensorrt.uses_plugins) == (("cuda", 0), True)
    assert (Providers.of([CPU]).device, Providers.of([CPU]).uses_plugins) == (("cpu", 0), False)


WRONG: list[tuple[Any, str]] = [
    ("CUDAExecutionProvider", "must be a list"),
    (7, "must be a list"),
    ([7], "is a name, or a pair"),
    ([(CPU,)], "is a name, or a pair"),
    ([(CPU, "device_id=0")], "is a name, or a pair"),
    ([CPU, CPU], "twice"),
    ([(TENSORRT_RTX, {}), CUDA], "works with CPUExecutionProvider alone"),
    (["CUDAProvider"], "Did you mean CUDAExecutionProvider"),
    (["Nonsense"], "has no provider 'Nonsense'. Available here: .*CPUExecutionProvider"),
]


@pytest.mark.parametrize(("providers", "message"), WRONG)
def test_lists_that_are_none(providers: Any, message: str) -> None:
    with pytest.raises(FlashNextError, match=message):
        Providers.of(providers)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (CUDA, r"pip uninstall onnxruntime && pip install 'flashnext-trt\[cuda\]'"),
        (TENSORRT, "only one of them may be there"),
        (TENSORRT_RTX, "pip install onnxruntime-ep-nv-tensorrt-rtx"),
        ("OpenVINOExecutionProvider", "Install a build of ONNX Runtime that has it"),
    ],
)
def test_unavailable_provider_is_one_sentence_with_what_there_is(name: str, remedy: str) -> None:
    with pytest.raises(EngineError, match=rf"{name} is not available here: onnxruntime .* has .*{CPU}.*{remedy}"):
        Providers.of([name])


@pytest.mark.usefixtures("all_available")
def test_device_id_is_a_number() -> None:
    with pytest.raises(RequestError, match="device_id = 'first'"):
        _ = Providers.of([(CUDA, {"device_id": "first"})]).device


# --- the plugin library ---------------------------------------------------------------------------


@pytest.mark.usefixtures("all_available")
def test_plugin_library_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tmp_path / "one.so", tmp_path / "other.so"
    one.touch()
    paths = "trt_extra_plugin_lib_paths"
    with pytest.raises(EngineError, match=r"names .*other\.so, which is not a file. Build .*flashnext plugins build"):
        Providers.of([(TENSORRT, {paths: f"{one};{other}"})])
    other.touch()
    assert Providers.of([(TENSORRT, {paths: f"{one};{other}"})]).entries[0][1][paths] == f"{one};{other}"

    def nothing(*_: object) -> None:
        raise PluginError("There is no plugin library.")

    monkeypatch.setattr(library, "find", nothing)
    with pytest.raises(PluginError, match="no plugin library"):
        Providers.of([TENSORRT])


def opened_with(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, Any]]:
    """What sessions are opened with; none of them opens."""
    seen: list[tuple[bytes, Any]] = []

    def session(model: bytes, _: ort.SessionOptions, providers: Any) -> None:
        seen.append((model, providers))
        raise RuntimeError("as far as a machine without a GPU goes")

    monkeypatch.setattr(ort, "InferenceSession", session)
    return seen


@pytest.mark.usefixtures("all_available")
@pytest.mark.parametrize("name", [CUDA, TENSORRT])
def test_each_provider_gets_its_form_of_the_graph(
    name: str, random_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lib.so"
    file.touch()
    options = {"trt_extra_plugin_lib_paths": str(file)} if name == TENSORRT else {"device_id": "0"}
    seen = opened_with(monkeypatch)
    with pytest.raises(EngineError, match="as far as a machine without a GPU goes"):
        LLM(random_bundle, providers=[(name, options), CPU])
    (model, providers), *_ = seen
    assert providers == [(name, options), (CPU, {})]
    graph = onnx.load_from_string(model)
    domains = {node.domain for node in graph.graph.node}
    if name == TENSORRT:
        assert "trt.plugins" in domains
        assert not graph.functions
    else:
        assert "flashnext" in domains
        assert graph.functions


def test_bfloat16_needs_plugins(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = dataclasses.replace(Manifest.read(random_bundle), dtype="bfloat16")
    with pytest.raises(EngineError, match=r"lacks kernels.*or the provider TensorrtExecutionProvider"):
        onnxruntime_engine.OnnxRuntimeEngine("head", random_bundle, manifest, None, 1)  # type: ignore[arg-type]


# --- running --------------------------------------------------------------------------------------


def test_providers_reach_the_session(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[ort.InferenceSession] = []
    real = ort.InferenceSession

    def session(*arguments: Any) -> ort.InferenceSession:
        sessions.append(real(*arguments))
        return sessions[-1]

    monkeypatch.setattr(ort, "InferenceSession", session)
    with LLM(random_bundle, providers=[(CPU, {"use_arena": "0"})]) as llm:
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids
    assert len(sessions) == 4
    assert all(s.get_providers() == [CPU] for s in sessions)


def test_states_on_a_device_give_the_same(random_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and states as copies that stay in a device's memory: here the CPU's, by the calls that a GPU's takes."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [3]]
    drafting = SamplingParams(max_tokens=8, temperature=0.0, draft_tokens=3)
    with LLM(random_bundle) as llm:
        expected = [llm.generate(prompts, params) for params in (GREEDY, drafting)]
    memory = Memory("cpu", 0)
    memory.is_host = False
    monkeypatch.setattr(Providers, "memory", lambda _: memory)
    with LLM(random_bundle) as llm:
        found = [llm.generate(prompts, params) for params in (GREEDY, drafting)]
        assert all(not state.any() for state in llm._runner.states.values())  # type: ignore[union-attr]
    assert [[o.token_ids for o in outputs] for outputs in found] == [[o.token_ids for o in e] for e in expected]
    assert validate(random_bundle).passed
    with pytest.raises(RequestError, match="needs states that can be read"):
        LLM(random_bundle, prefix_cache_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_copies_keep_every_bit_and_are_made_once(dtype: Any) -> None:
    memory = Memory("cpu", 0)
    memory.is_host = False
    array = np.arange(12).astype(dtype).reshape(3, 4)
    value = memory.bound(array)
    assert memory.bound(array) is value
    assert value.data_ptr() != array.ctypes.data
    copied = (ctypes.c_uint8 * array.nbytes).from_address(value.data_ptr())
    assert bytes(copied) == array.tobytes()


def test_provider_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own words about it, in one sentence."""

    class Package:
        @staticmethod
        def get_ep_name() -> str:
            return TENSORRT_RTX

        @staticmethod
        def get_library_path() -> str:
            return str(tmp_path / "nothing.so")

    monkeypatch.setattr(onnxruntime_providers, "_rtx_library", lambda: Package)
    with pytest.raises(EngineError, match=r"cannot be loaded here: .*nothing\.so.* It needs a GPU and its driver"):
        Providers.of([TENSORRT_RTX]).memory()


def test_devices_of_a_provider_library_are_added_to_the_options(
    random_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way by which TensorRT for RTX is asked for, with the CPU's own device in its place."""
    cpus = [device for device in ort.get_ep_devices() if device.ep_name == CPU]
    monkeypatch.setattr(onnxruntime_providers, "_rtx_library", lambda: object())
    monkeypatch.setattr(onnxruntime_providers, "_rtx_devices", lambda _: cpus[:1])
    monkeypatch.setattr(Providers, "memory", lambda _: Memory("cpu", 0))
    with LLM(random_bundle, providers=[(TENSORRT_RTX, {})]) as llm:
        assert llm.generate([[1, 2, 3]], GREEDY)[0].token_ids


# --- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDAExecutionProvider", ("CUDAExecutionProvider", {})),
        ("CUDAExecutionProvider:device_id=1", ("CUDAExecutionProvider", {"device_id": "1"})),
        ("A:paths=/a:b,c=d=e", ("A", {"paths": "/a:b", "c": "d=e"})),
        ("A:shapes=x:1x2,y:3,more=1", ("A", {"shapes": "x:1x2,y:3", "more": "1"})),
    ],
)
def test_provider_on_the_command_line(text: str, expected: tuple[str, dict[str, str]]) -> None:
    assert provider(text) == expected


def test_provider_on_the_command_line_that_is_none() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME or NAME:OPTION"):
        provider("A:b")


@pytest.mark.parametrize("command", ["run", "bench", "validate"])
def test_command_refuses_with_one_sentence(
    command: str, random_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ["--prompt", "a"] if command == "run" else []
    assert main([command, str(random_bundle), *prompt, "--provider", CUDA]) == 2
    assert f"{CUDA} is not available here" in capsys.readouterr().err


def test_other_engines_have_no_providers(random_bundle: Path) -> None:
    with pytest.raises(RequestError, match="torch has none"):
        LLM(random_bundle, "torch", providers=[CPU])


def test_providers_of_an_engine_that_takes_no_part(random_bundle: Path) -> None:
    with pytest.raises(RequestError, match="which takes no part"):
        validate(random_bundle, "torch:host", providers=[CPU])


def test_plans_have_no_outputs_inside(random_bundle: Path) -> None:
    with pytest.raises(EngineError, match="flashnext golden BUNDLE --out FOLDER --per-layer"):
        validate(random_bundle, "tensorrt", per_layer=True)
