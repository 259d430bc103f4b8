"""NgramInjection in plain operators: pending write, gated n-gram value and its dilated convolution on every branch.

All in float32 with one rounding at the store. The convolution's inputs pass through the activation dtype before they
are used, because later steps read them from the ring in that dtype.
"""

from __future__ import annotations

import math

from flashnext.export.ops.portable import common, gated_residual, residual_store
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, Ring
from flashnext.export.ops.portable.context import Context


def build(c: Context) -> dict[str, Value]:
    s, width = c.sizes, c.sizes["n"] * c.sizes["H"]
    branches = gated_residual.write(c)
    u = _gate(c, branches) * c["value"].cast(FLOAT).unsqueeze(2)
    fed = _norm(c, u, "norm_conv_weight").reshape(0, 0, width).cast(c.dtypes["T"])
    rows = common.step_rows(c["slots"], c["past_len"], c["new_len"], s["P"])
    ring = Ring(c["conv_state"].gather(rows.slot, 0), s["Q"], rows)
    conv_state = common.write_slots(c["conv_state"], rows.slot, ring.after(fed))
    dilation = c.integer("dilation")
    history = ring.before((s["width"] - 1) * dilation)
    mixed = common.silu(common.causal_conv(history, fed, c["conv_weight"], s["width"], dilation))
    total = branches + u + mixed.reshape(0, 0, s["n"], s["H"])
    return {**residual_store.stored(c, total), "conv_state_out": conv_state}


def _gate(c: Context, branches: Value) -> Value:
    """sigmoid of the signed root of each branch's similarity to the n-gram key, [B, S, n, 1]."""
    key = _norm(c, c["key"].cast(FLOAT).reshape(0, 0, c.sizes["n"], c.sizes["H"]), "norm_key_weight")
    query = _norm(c, branches, "norm_query_weight")
    d = (key * query).reduce("Sum", -1, keep=True) / math.sqrt(c.sizes["H"])
    return (d.op("Sign") * d.op("Abs").op("Max", 1e-6).op("Sqrt")).op("Sigmoid")


def _norm(c: Context, x: Value, weight: str) -> Value:
    return common.rms_norm(x, c[weight].reshape(c.sizes["n"], c.sizes["H"]), c.number("eps"))
