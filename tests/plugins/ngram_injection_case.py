"""Cases of NgramInjection: one step of sequences in slots on dirty memory, with the reference's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kernel_checks import Case, normal, poisoned
from torch import Tensor

from flashnext.export.ops.reference import REFERENCES
from flashnext.export.ops.reference.residual_store import StochasticRounding, dequantize, dynamic_scale, quantize

E4M3 = torch.float8_e4m3fn
SITE, SEED = 7, 0x0FEDCBA987654321
OFFICIAL = {"branches": 4, "hidden": 2560, "width": 4, "dilation": 3}
SMALL = {"branches": 2, "hidden": 16, "width": 4, "dilation": 3}
WEIGHTS = ("key", "value", "norm_key_weight", "norm_query_weight", "norm_conv_weight", "conv_weight")
ROWS = ("slots", "past_len", "new_len")


class Row(NamedTuple):
    """One sequence of the step."""

    past: int
    new: int


def ngram_injection_case(
    form: str,
    rows: Sequence[Row],
    steps: int,
    *,
    branches: int,
    hidden: int,
    width: int,
    dilation: int,
    window: int = 4,
    dtype: torch.dtype = torch.float32,
    state: str = "plain",
    stochastic: bool = False,
    quiet: bool = False,
    seed: int = 0,
) -> Case:
    """`state`: "plain", or FP8 with "static" or "dynamic" scales; `stochastic`: how it is rounded.

    `quiet`: the values and the conv's past are zero, so that nothing is added to the branches.
    """
    g = torch.Generator().manual_seed(seed)
    batch, slots, channels = len(rows), len(rows) + 2, branches * hidden
    values: dict[str, Any] = {
        "embedding": normal(g, batch, steps, hidden, dtype=dtype),
        "r": normal(g, batch, steps, branches, hidden, dtype=dtype),
        "y": normal(g, batch, steps, hidden, dtype=dtype),
        "s": torch.rand(batch, steps, branches, generator=g) * 2,
        "key": normal(g, batch, steps, channels, dtype=dtype),
        "value": normal(g, batch, steps, hidden, dtype=dtype),
        **{name: normal(g, channels, dtype=dtype, scale=0.2) for name in WEIGHTS[2:5]},
        "conv_weight": normal(g, channels, 1, width, dtype=dtype, scale=0.5),
        **_rows(g, rows, slots),
        "conv_state": normal(g, slots + 1, (width - 1) * dilation + window, channels, dtype=dtype),
    }
    if quiet:
        values["value"].zero_()
        values["conv_state"].zero_()
    given = ["embedding"] if form == "embed" else ["r", "y", "s"]
    values = {n: v for n, v in values.items() if n in (*given, *WEIGHTS, *ROWS, "conv_state")}
    for slot, row in zip(values["slots"].tolist(), rows, strict=True):
        if row.past == 0:
            values["conv_state"][slot] = torch.nan
    read = {n: values[n] for n in given}
    if state != "plain" and form == "pending":
        read["r"], codes = _fp8_state(values["r"].float(), state)
        values |= codes
    values |= {"r_out": poisoned(batch, steps, branches, hidden, dtype=dtype if state == "plain" else E4M3)}
    attributes: dict[str, Any] = {"eps": 1e-6, "dilation": dilation}
    inputs = [t.clone() for t in (*read.values(), *(values[n] for n in (*WEIGHTS, *ROWS, "conv_state")))]
    r_out, conv_state = REFERENCES["NgramInjection"][form](*inputs, branches=branches, **attributes)
    expected = {"r_out": r_out.to(dtype), "conv_state": conv_state}
    rounding = None
    if stochastic:
        values |= {"positions": values["past_len"][:, None] + torch.arange(steps, dtype=torch.int32)}
        attributes |= {"site": SITE, "seed": SEED}
        rounding = StochasticRounding(values["positions"], SITE, SEED)
    if state == "static":
        values["r_out_scale"] = torch.linspace(0.03, 0.05, branches)
        expected["r_out"] = quantize(r_out, values["r_out_scale"], rounding=rounding)
    if state == "dynamic":
        values["r_out_token_scale"] = poisoned(batch, steps, branches)
        expected["r_out_token_scale"] = dynamic_scale(r_out)
        expected["r_out"] = quantize(r_out, expected["r_out_token_scale"], rounding=rounding)
    return Case("ngram_injection", {**values, **attributes}, expected)


def _rows(g: torch.Generator, rows: Sequence[Row], slots: int) -> dict[str, Tensor]:
    """Distinct slots in any order; rows without tokens are padding and share the last one."""
    order = torch.randperm(slots, generator=g)[: len(rows)].tolist()
    table = [(slot if row.new else slots, row.past, row.new) for slot, row in zip(order, rows, strict=True)]
    columns = zip(*table, strict=True)
    return {name: torch.tensor(column, dtype=torch.int32) for name, column in zip(ROWS, columns, strict=True)}


def _fp8_state(r: Tensor, state: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The values that the codes stand for; and the codes and scales as the kernel takes them."""
    scale = torch.linspace(0.02, 0.04, r.shape[2]) if state == "static" else dynamic_scale(r)
    codes = quantize(r, scale)
    return dequantize(codes, scale), {"r": codes, "r_scale" if state == "static" else "r_token_scale": scale}
