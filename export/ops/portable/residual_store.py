"""Residual branches as they are kept: in the activations' dtype, or in FP8 with scales, in plain operators.

ONNX's Cast to FLOAT8E4M3FN saturates and rounds to nearest even; ONNX Runtime's agrees with the reference on every
float32 value. Division, not a product with the reciprocal: that would store other codes.
"""

from __future__ import annotations

from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT
from flashnext.export.ops.portable.context import Context
from flashnext.export.ops.ports import CODES, split_form
from flashnext.export.residual_scales import FORMATS, LARGEST_FLOAT, SMALLEST_SCALE


def held(c: Context) -> Value:
    """float32 branches [B, S, n, H] of the input r."""
    branches = c["r"].cast(FLOAT)
    mode = split_form(c.form)[1]
    if not mode:
        return branches
    return branches * (c["r_scale"].unsqueeze(1) if mode == "static" else c["r_token_scale"].unsqueeze(3))


def stored(c: Context, branches: Value) -> dict[str, Value]:
    """The outputs that keep float32 branches [B, S, n, H]: r_out, and dynamic scales."""
    mode = split_form(c.form)[1]
    if not mode:
        return {"r_out": branches.cast(c.dtypes["T"])}
    if mode == "static":
        return {"r_out": (branches / c["r_out_scale"].unsqueeze(1)).cast(CODES)}
    scale = _dynamic_scale(branches)
    return {"r_out": (branches / scale.unsqueeze(3)).cast(CODES), "r_out_token_scale": scale}


def _dynamic_scale(branches: Value) -> Value:
    """[B, S, n]: the largest magnitude gets the largest code; 1 for a branch of zeros; NaN does not count."""
    magnitude = branches.op("IsNaN", dtype="bool").where(0.0, branches.op("Abs"))
    most = magnitude.reduce("Max", 3)
    scale = (most.op("Min", LARGEST_FLOAT) / FORMATS["e4m3"]).op("Max", SMALLEST_SCALE)
    return (most > 0.0).where(scale, 1.0)
