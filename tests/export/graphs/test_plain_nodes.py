"""Plain nodes of traced graphs as TensorRT takes them: constant axes, no casts from FP8."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper

from flashnext.export.graphs import plain_nodes
from flashnext.runtime.engines.base import numpy_dtype


def traced() -> onnx.ModelProto:
    """A mean as torch.onnx writes it, of values that come in FP8."""
    constants = {"axes": np.array([-1]), "shape": np.array([-1])}
    nodes = [helper.make_node("Constant", [], [k], value=onnx.numpy_helper.from_array(v)) for k, v in constants.items()]
    nodes += [
        helper.make_node("Cast", ["codes"], ["x"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["axes", "shape"], ["settled"]),
        helper.make_node("ReduceMean", ["x", "settled"], ["y"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("codes", TensorProto.FLOAT8E4M3FN, ["B", 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B"])]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def run(model: onnx.ModelProto, codes: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(codes.view(np.uint8), TensorProto.FLOAT8E4M3FN)
    result: np.ndarray = session.run_with_ort_values(["y"], {"codes": value})[0].numpy()
    return result


def test_axes_are_constants_and_codes_are_dequantized() -> None:
    before = traced()
    model = ir.serde.deserialize_model(before)
    assert plain_nodes.settle(model) == {"axes": 1, "codes": 1}
    after = ir.serde.serialize_model(model)
    onnx.checker.check_model(after, full_check=True)
    assert sorted(n.op_type for n in after.graph.node) == ["Constant", "Constant", "DequantizeLinear", "ReduceMean"]
    codes = np.random.default_rng(0).standard_normal((3, 4)).astype(numpy_dtype("float8_e4m3fn"))
    np.testing.assert_array_equal(run(after, codes), run(before, codes))
    assert plain_nodes.settle(model) == {"axes": 0, "codes": 0}
