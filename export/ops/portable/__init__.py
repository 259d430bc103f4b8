"""The custom ops as ONNX functions in plain operators: any ONNX runtime can run a graph that carries them.

Why: this is the path of a machine without a GPU (ONNX Runtime), of TensorRT for RTX (no plugins), and the reference
that plugin engines are compared with. A form of an op is an overload of its function; sizes are baked in.

    function("GatedResidual", "pending", {"n": 4, "H": 64, "rank": 8}, {"branches": 4, "eps": 1e-6}, {"T": "float32"})

builder.py   expressions to ONNX nodes
common.py    norms, rotation, rings, the rows that a step may touch
context.py   what an op's builder gets
<op>.py      one op each; delta_rule.py, block_index.py and expert_weights.py hold the inner parts of three,
             residual_store.py and fp8_codes.py what is kept in FP8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from flashnext.export.ops import schema
from flashnext.export.ops.portable import (
    fp8_codes,
    gated_delta_net,
    gated_residual,
    ngram_injection,
    sparse_attention,
    sparse_moe,
)
from flashnext.export.ops.portable.builder import Body, Value
from flashnext.export.ops.portable.context import Context, Steps

BUILDERS: dict[str, Callable[[Context], dict[str, Value]]] = {
    "GatedDeltaNet": gated_delta_net.build,
    "GatedResidual": gated_residual.build,
    "NgramInjection": ngram_injection.build,
    "SparseAttention": sparse_attention.build,
    "SparseMoE": sparse_moe.build,
}


def function(
    op_name: str,
    form: str,
    sizes: Mapping[str, int],
    attributes: Mapping[str, float | str],
    dtypes: Mapping[str, str],
    steps: Steps = "any",
    words: bool = False,
) -> onnx.FunctionProto:
    """The function of one (op, form): overload `form`, the table's inputs, outputs and attributes.

    Args:
        sizes: the table's named dimensions, except B and S; SparseAttention also needs W, the most tokens of a step
            that gathers the chosen tokens instead of masking all.
        attributes: the op's attributes; they are declared (a node carries them, and `form`) but baked in.
        steps: "few" gives a function for decode and verification alone (S <= W), "many" one for prefill, neither with a
            branch on the step's size. TensorRT for RTX needs them: it cannot build a loop inside a branch.
        dtypes: dtype of each type variable, as in {"T": "float32", "E": "bfloat16"}.
        words: the other thing that TensorRT for RTX needs: ports of bytes take words of four codes (fp8_codes.py), and
            nothing is cast to FP8.

    Raises:
        KeyError: unknown op or form, or a size or attribute is missing.
    """
    op = schema.op(op_name)
    ports = op.form(form)
    if words:
        dtypes = {**dtypes, **dict.fromkeys(("C", fp8_codes.BYTES), fp8_codes.WORDS)}
    body = Body({p.name: dtypes.get(p.dtype, p.dtype) for p in ports.inputs}, quantizes=words)
    given = {a.size: int(attributes[a.name]) for a in op.attributes if a.size}
    made = BUILDERS[op_name](Context(body, form, {**sizes, **given}, attributes, dtypes, steps))
    outputs = {p.name: made[p.name] for p in ports.outputs}
    return body.function(schema.DOMAIN, op_name, form, outputs, [a.name for a in op.attributes] + ["form"])
