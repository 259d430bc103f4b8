"""Custom nodes as they are kept: one node per op with its form as overload, and the portable function beside it.

A function is made for fixed sizes, attributes and dtypes. Where nodes of one form differ in these (experts in BF16 in
one layer and in F32 in another), the second kind has the overload "plain_2", and so on; the attribute `form` stays.
`attach` returns how many nodes of each op and form a graph holds, so that a lost one fails a test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import onnx_ir as ir

from flashnext.export.ops import portable, schema
from flashnext.export.ops.portable.context import Steps

_DTYPES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT32: "int32",
    ir.DataType.UINT8: "uint8",
    ir.DataType.FLOAT8E4M3FN: "float8_e4m3fn",
}


def attach(model: ir.Model, window: int, steps: Steps = "any", words: bool = False) -> Counter[str]:
    """Give every custom node its form as overload, and the model the functions, in place of those that it has.

    `steps` and `words` say what the functions are for (portable.function).
    """
    for identifier in [i for i in model.functions if i[0] == schema.DOMAIN]:
        del model.functions[identifier]
    counts: Counter[str] = Counter()
    made: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in model.graph:
        if node.domain != schema.DOMAIN:
            continue
        op = schema.op(node.op_type)
        form = op.form(node.attributes["form"].as_string())
        described = _describe(node, op, form, window)
        kinds = made.setdefault((op.name, form.name), [])
        is_new = described not in kinds
        if is_new:
            kinds.append(described)
        number = kinds.index(described) + 1
        node.overload = form.name if number == 1 else f"{form.name}_{number}"
        if is_new:
            _add_function(model, node, form, {**described, "steps": steps, "words": words})
        counts[f"{op.name}.{form.name}"] += 1
    return counts


def _add_function(model: ir.Model, node: ir.Node, form: schema.Form, described: dict[str, Any]) -> None:
    proto = portable.function(node.op_type, form.name, **described)
    proto.overload = node.overload
    function = ir.serde.deserialize_function(proto)
    model.functions[function.identifier()] = function


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
