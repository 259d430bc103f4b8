"""One op with its portable function as an ONNX model and an ONNX Runtime session; and how results are compared."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from hypothesis import settings

from flashnext.export.ops import portable, schema
from flashnext.export.ops.portable.builder import DTYPES, OPSET

TOLERANCE = 1e-5
EXAMPLES = settings(max_examples=int(os.environ.get("FLASHNEXT_EXAMPLES", "25")), deadline=None)
Items = tuple[tuple[str, Any], ...]


def model(
    op: str, form: str, sizes: dict[str, int], attributes: dict[str, Any], dtypes: dict[str, str], steps: Any = "any"
) -> onnx.ModelProto:
    """A graph of one node that carries the op, with the table's shapes."""
    ports = schema.op(op).form(form)
    known = {**sizes, **{a.size: attributes[a.name] for a in schema.op(op).attributes if a.size}}

    def info(port: schema.Port) -> onnx.ValueInfoProto:
        shape = [d if d in ("B", "S") else schema.evaluate(d, known) for d in port.shape]
        return onnx.helper.make_tensor_value_info(port.name, DTYPES[dtypes.get(port.dtype, port.dtype)], shape)

    node = onnx.helper.make_node(
        op, [p.name for p in ports.inputs], [p.name for p in ports.outputs], domain=schema.DOMAIN, overload=form,
        form=form, **attributes,
    )  # fmt: skip
    graph = onnx.helper.make_graph([node], op, [info(p) for p in ports.inputs], [info(p) for p in ports.outputs])
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(schema.DOMAIN, schema.VERSION)]
    function = portable.function(op, form, sizes, attributes, dtypes, steps)
    return onnx.helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)


def dtypes_with(op: str, activation: str) -> dict[str, str]:
    """Every type variable of the op: the activation's dtype where it may be, else the first it may be."""
    variables = schema.op(op).type_variables
    return {v: activation if activation in allowed else allowed[0] for v, allowed in variables.items()}


@functools.cache
def session(op: str, form: str, sizes: Items, attributes: Items, dtypes: Items, steps: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    made = model(op, form, dict(sizes), dict(attributes), dict(dtypes), steps)
    return ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])


def near(got: np.ndarray, want: np.ndarray, what: str, tolerance: float = TOLERANCE) -> None:
    """Relative to the norm of the whole; memory that nobody wrote may be NaN on both sides."""
    assert got.shape == want.shape, what
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=what)
    error = np.linalg.norm(np.nan_to_num(got - want))
    assert error <= tolerance * np.linalg.norm(np.nan_to_num(want)) + 1e-7, f"{what}: {error}"
