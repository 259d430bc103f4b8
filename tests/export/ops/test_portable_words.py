"""Portable functions for TensorRT for RTX: codes in words of four give what codes in bytes give, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from flashnext.export.ops import portable, schema
from flashnext.export.ops.portable import fp8_codes
from flashnext.export.ops.portable.builder import DTYPES, OPSET, Body
from flashnext.runtime.engines.base import numpy_dtype

SIZES = {
    "n": 2, "H": 64, "rank": 3, "P": 4, "Q": 9, "C1": 17, "NB1": 5, "W": 2, "Nq": 4, "Nkv": 2, "D": 8, "Di": 6,
    "Ni": 2, "F": 2, "experts": 5, "I": 192, "width": 3, "budget_blocks": 2, "B": 2, "S": 3,
}  # fmt: skip
OTHER_ATTRIBUTES = {"eps": 1e-6, "dilation": 3, "block": 4, "rope_scale": 1.0, "top_k": 2, "normalize": 1}
CASES = [
    ("SparseMoE", "fp8_block"),
    ("SparseMoE", "nvfp4"),
    ("SparseAttention", "select_fp8_cache"),
    ("SparseAttention", "given_fp8_cache"),
    ("GatedResidual", "pending_fp8_static"),
    ("GatedResidual", "start_fp8_dynamic"),
    ("NgramInjection", "pending_fp8_dynamic"),
]
NAN = 0x7F


def is_codes(port: schema.Port) -> bool:
    return port.dtype in ("C", "uint8")


def run(op: str, form: str, inputs: dict[str, np.ndarray], steps: Any, words: bool) -> dict[str, np.ndarray]:
    ports = schema.op(op).form(form)
    attributes = {a.name: SIZES[a.size] if a.size else OTHER_ATTRIBUTES[a.name] for a in schema.op(op).attributes}
    dtypes = {"T": "float32", "C": "uint8"}

    def info(port: schema.Port) -> onnx.ValueInfoProto:
        shape = [schema.evaluate(d, SIZES) for d in port.shape]
        dtype = dtypes.get(port.dtype, port.dtype)
        if words and is_codes(port):
            shape[-1], dtype = shape[-1] // 4, "int32"  # type: ignore[operator]
        return onnx.helper.make_tensor_value_info(port.name, DTYPES[dtype], shape)

    names = [p.name for p in ports.inputs], [p.name for p in ports.outputs]
    node = onnx.helper.make_node(op, *names, domain=schema.DOMAIN, overload=form, form=form, **attributes)
    graph = onnx.helper.make_graph([node], op, [info(p) for p in ports.inputs], [info(p) for p in ports.outputs])
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(schema.DOMAIN, schema.VERSION)]
    function = portable.function(op, form, SIZES, attributes, dtypes, steps, words)
    model = onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)
    feeds = {p.name: inputs[p.name].view(np.int32) if words and is_codes(p) else inputs[p.name] for p in ports.inputs}
    return dict(zip(names[1], _run(model, feeds, names[1]), strict=True))


def _run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = {k: _ort_value(v) for k, v in feeds.items()}
    return [_numpy(value) for value in session.run_with_ort_values(outputs, values)]


def _ort_value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype != numpy_dtype("float8_e4m3fn"):
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint8), DTYPES["float8_e4m3fn"])


def _numpy(value: ort.OrtValue) -> np.ndarray:
    array: np.ndarray = value.numpy()
    return array


def random_inputs(op: str, form: str, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    out = {}
    for port in schema.op(op).form(form).inputs:
        shape = [schema.evaluate(d, SIZES) for d in port.shape]
        if is_codes(port):
            magnitude, sign = random.integers(0, NAN, shape), random.integers(0, 2, shape)
            out[port.name] = (magnitude | sign << 7).astype(np.uint8)
        elif port.dtype == "float8_e4m3fn":
            out[port.name] = random.standard_normal(shape).astype(numpy_dtype(port.dtype))
        elif port.dtype != "int32":
            out[port.name] = np.abs(random.standard_normal(shape)).astype(np.float32)
    lengths = {"slots": [2, 0], "past_len": [5, 1], "new_len": [3, 2], "blocks_len": [6, 2]}
    out |= {name: np.array(values, np.int32) for name, values in lengths.items()}
    out["blocks"] = np.array([[0, -1], [-1, -1]], np.int32)
    return out


@pytest.mark.parametrize("steps", ["few", "many"])
@pytest.mark.parametrize(("op", "form"), CASES)
def test_words_give_what_bytes_give(op: str, form: str, steps: str) -> None:
    inputs = random_inputs(op, form, seed=0)
    by_bytes, by_words = (run(op, form, inputs, steps, words) for words in (False, True))
    for name, expected in by_bytes.items():
        found = by_words[name]
        assert found.tobytes() == expected.tobytes(), name
        assert np.isfinite(expected.astype(np.float32)).all(), name


def test_every_code_survives_packing() -> None:
    codes = (
        np.arange(1024, dtype=np.uint32).astype(np.uint8)[np.random.default_rng(0).permutation(1024)].reshape(4, 256)
    )
    body = Body({"words": "int32"})
    numbers = fp8_codes.numbers(body.inputs["words"], 256, 1)
    outputs = {"numbers": numbers, "again": fp8_codes.packed(numbers, "int32", 1)}
    function = body.function("test", "Codes", "", outputs, ())
    node = onnx.helper.make_node("Codes", ["words"], list(outputs), domain="test")
    infos = [onnx.helper.make_tensor_value_info(n, DTYPES["int32"], None) for n in ("words", *outputs)]
    infos[0] = onnx.helper.make_tensor_value_info("words", DTYPES["int32"], [4, 64])
    graph = onnx.helper.make_graph([node], "codes", infos[:1], infos[1:])
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid("test", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)
    found, again = _run(model, {"words": codes.view(np.int32)}, list(outputs))
    np.testing.assert_array_equal(found, codes)
    assert again.tobytes() == codes.tobytes()
