"""What the builder's forms of a graph take and give is what the engine expects of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from engine_folder import Machine, write_engine

from flashnext.builder.engine_manifest import EngineGraph
from flashnext.builder.plugin_graph import plugin_form
from flashnext.builder.portable_graph import portable_form
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.engines.tensorrt import fitting
from flashnext.runtime.engines.tensorrt.arrays import DeviceArray
from flashnext.runtime.model_runner import open_checkpoint

DTYPES = {"FLOAT": "float32", "BFLOAT16": "bfloat16", "INT32": "int32", "UINT8": "uint8", "INT8": "int8"}
DTYPES["FLOAT8E4M3FN"] = "float8_e4m3fn"
Tensors = dict[str, tuple[bool, str, tuple[int, ...]]]


class Plan:
    """What is asked of a plan, from the graph that it would be built of."""

    def __init__(self, model: bytes) -> None:
        graph = onnx.load_from_string(model).graph
        self._tensors = {v.name: (True, *_form(v)) for v in graph.input}
        self._tensors |= {v.name: (False, *_form(v)) for v in graph.output}

    def tensors(self) -> Tensors:
        return self._tensors

    def host_tensors(self) -> list[str]:
        return []


def _form(value: onnx.ValueInfoProto) -> tuple[str, tuple[int, ...]]:
    kind = value.type.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
    return DTYPES[onnx.TensorProto.DataType.Name(kind.elem_type)], tuple(sizes)


@pytest.mark.parametrize("graph", ["head", "body", "mtp", "mtp_draft"])
def test_both_forms_fit_the_bundle(random_bundle: Path, graph: str) -> None:
    spec = Manifest.read(random_bundle).graphs[graph]
    source = (random_bundle / spec.file).read_bytes()
    with_plugins = plugin_form(source)
    built = EngineGraph((), (), (), spec.states, True, with_plugins.codes)
    assert list(fitting.differences(Plan(with_plugins.model), spec, built)) == []  # type: ignore[arg-type]
    found = Plan(with_plugins.model)
    del found.tensors()["new_len"]  # a length that nothing reads
    assert list(fitting.differences(found, spec, built)) == []  # type: ignore[arg-type]
    state = next(iter(spec.states))
    del found.tensors()[state]
    assert list(fitting.differences(found, spec, built)) == [f"it lacks {state}"]  # type: ignore[arg-type]
    plain = portable_form(source, 8, "decode", weights_as_inputs=True)
    built = EngineGraph((), (), plain.weights, spec.states, False, plain.codes)
    assert list(fitting.differences(Plan(plain.model), spec, built)) == []  # type: ignore[arg-type]
    assert plain.weights


def test_weights_that_are_no_inputs_of_the_bundle_are_bound_too(bundle: Path, machine: Machine) -> None:
    """`flashnext build --weights-as-inputs`: the plan takes what the bundle's graph has inside."""
    manifest = Manifest.read(bundle)
    checkpoint = open_checkpoint(manifest)
    extra: dict[str, list[Any]] = {}
    for name, spec in manifest.graphs.items():
        form = portable_form((bundle / spec.file).read_bytes(), manifest.window, "decode", weights_as_inputs=True)
        found = Plan(form.model).tensors()
        extra[name] = [(weight, *found[weight][1:]) for weight in form.weights]
    write_engine(bundle, "tensorrt-rtx", {"extra": extra})
    machine()
    with LLM(bundle, engine="tensorrt-rtx") as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
        body = llm._runner._engines["body"]  # type: ignore[union-attr]
        for weight, _, shape in extra["body"]:
            stored = checkpoint.array(weight)
            place = DeviceArray(
                llm._runner._engines["body"]._session.device, 1, body._bound[weight], shape, stored.dtype
            )  # type: ignore[union-attr,attr-defined]
            np.testing.assert_array_equal(place.copy().view(np.uint8), stored.view(np.uint8))
