"""GatedResidual in plain operators: write the pending block output, read the next block's input, all in float32.

The read uses the float32 value of the new branches; only the stored ones are rounded.
"""

from __future__ import annotations

from flashnext.export.ops.portable import residual_store
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, linear, rms_norm, silu
from flashnext.export.ops.portable.context import Context
from flashnext.export.ops.ports import split_form


def build(c: Context) -> dict[str, Value]:
    n, hidden = c.sizes["n"], c.sizes["H"]
    branches = write(c)
    normed = rms_norm(branches, c["norm_weight"].reshape(n, hidden), c.number("eps"))
    flat = normed.reshape(0, 0, n * hidden)
    low = silu(linear(flat, c["down_weight"]) / n)
    gate = linear(low, c["up_weight"]).op("Sigmoid").reshape(0, 0, n, hidden)
    form = split_form(c.form)[0]
    out = {} if form == "settled" else residual_store.stored(c, branches)
    out["x"] = (gate * normed).reduce("Mean", 2).cast(c.dtypes["T"])
    if form != "last":
        out["s_out"] = (linear(flat, c["inject_weight"]) / n).op("Sigmoid") * 2
    return out


def write(c: Context) -> Value:
    """The branches [B, S, n, H] after the pending write, float32; every branch starts as the embedding."""
    form = split_form(c.form)[0]
    if form == "embed":
        return c["embedding"].cast(FLOAT).unsqueeze(2).expand(1, 1, c.sizes["n"], 1)
    if form == "start":
        return c["start"].cast(FLOAT).op("Identity")
    held = residual_store.held(c)
    return held if form == "settled" else held + c["s"].unsqueeze(3) * c["y"].cast(FLOAT).unsqueeze(2)
