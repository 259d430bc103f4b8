"""The plain nodes of a traced graph as TensorRT takes them too; other runtimes do not mind.

Each pass returns how many nodes it has changed. What TensorRT makes of custom nodes is the builder's business.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def settle(model: ir.Model) -> Counter[str]:
    """Run all passes; returns the number of changes of each."""
    changes = Counter({"axes": settle_axes(model), "codes": dequantize_codes(model)})
    RemoveUnusedNodesPass()(model)
    return changes


def settle_axes(model: ir.Model) -> int:
    """Give reductions their axes as constants.

    torch.onnx reshapes the constant axes of a mean to one dimension, which they have already. TensorRT takes constants
    only, and does not compute them.
    """
    changed = 0
    for node in model.graph:
        if not node.op_type.startswith("Reduce") or len(node.inputs) < 2 or node.inputs[1] is None:
            continue
        reshape = node.inputs[1].producer()
        if reshape is None or reshape.op_type != "Reshape":
            continue
        axes = ir.convenience.get_const_tensor(reshape.inputs[0])  # type: ignore[arg-type]
        if axes is not None and len(axes.shape) == 1:
            node.replace_input_with(1, reshape.inputs[0])
            changed += 1
    return changed


def dequantize_codes(model: ir.Model) -> int:
    """Put a dequantization with a scale of 1 in place of every cast from FP8, which TensorRT has not."""
    casts = [n for n in model.graph if n.op_type == "Cast" and n.inputs[0] is not None
             and n.inputs[0].dtype == ir.DataType.FLOAT8E4M3FN]  # fmt: skip
    for cast in casts:
        if cast.attributes["to"].as_int() != ir.DataType.FLOAT:
            raise AssertionError(f"{cast.name} makes something else of FP8 than float32")
        value = cast.outputs[0]
        one = ir.node("Constant", [], {"value": ir.tensor(np.float32(1.0))}, name=f"{cast.name}_scale")
        made = ir.node("DequantizeLinear", [cast.inputs[0], one.outputs[0]], name=cast.name)
        made.outputs[0].dtype, made.outputs[0].shape = ir.DataType.FLOAT, value.shape
        one.outputs[0].dtype, one.outputs[0].shape = ir.DataType.FLOAT, ir.Shape([])
        one.outputs[0].name, name = f"{value.name}_scale", value.name
        model.graph.insert_before(cast, [one, made])
        ir.convenience.replace_all_uses_with(value, made.outputs[0])
        model.graph.remove(cast, safe=True)
        made.outputs[0].name = name
    return len(casts)
