"""Custom nodes as they are kept: one node per op with its form as overload, and the portable function beside it.

`attach` returns how many nodes of each op and form a graph holds, so that a lost one fails a test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir as ir

from flashnext.export.ops import portable, schema

_DTYPES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT32: "int32",
}


def attach(model: ir.Model, window: int) -> Counter[str]:
    """Give every custom node its form as overload, and the model the functions."""
    counts: Counter[str] = Counter()
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for node in model.graph:
        if node.domain != schema.DOMAIN:
            continue
        op = schema.op(node.op_type)
        form = op.form(node.attributes["form"].as_string())
        described = _describe(node, op, form, window)
        key = (op.name, form.name)
        if key not in made:
            made[key] = described
            function = ir.serde.deserialize_function(portable.function(op.name, form.name, **described))
            model.functions[function.identifier()] = function
        elif made[key] != described:
            raise AssertionError(f"two {key} nodes of one graph differ: {made[key]} and {described}")
        node.overload = form.name
        counts[f"{op.name}.{form.name}"] += 1
    return counts


def _describe(node: ir.Node, op: schema.Op, form: schema.Form, window: int) -> dict[str, Any]:
    """Sizes, attributes and dtypes of a node, from which its portable function is made."""
    attributes = {a.name: node.attributes[a.name].value for a in op.attributes}
    shapes = [_dims(value) for value in node.inputs]
    bound = schema.bind_sizes(op, form, shapes, attributes)
    sizes = {name: size for name, size in bound.items() if isinstance(size, int)}
    dtypes: dict[str, str] = {}
    for port, value in zip(form.inputs, node.inputs, strict=True):
        assert value is not None
        assert value.dtype is not None
        dtypes.setdefault(port.dtype, _DTYPES[value.dtype])
    return {
        "sizes": {"W": window} | sizes,
        "attributes": attributes,
        "dtypes": {v: dtypes[v] for v in op.type_variables if v in dtypes},
    }


def _dims(value: ir.Value | None) -> list[object]:
    assert value is not None
    assert value.shape is not None
    return [d if isinstance(d, int) else str(d) for d in value.shape]
