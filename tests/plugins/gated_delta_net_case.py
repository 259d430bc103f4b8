"""Cases of GatedDeltaNet: one step of sequences in slots on dirty memory, with the reference's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kernel_checks import Case, normal, poisoned
from torch import Tensor

from flashnext.export.ops.reference import REFERENCES

INPUTS = ("qkv", "z", "a", "b", "conv_weight", "A_log", "dt_bias", "norm_weight")
ROWS = ("slots", "past_len", "accepted", "new_len")
STATES = ("conv_state", "recurrent_state", "pending_state")
OFFICIAL = {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "width": 4}
STATE_TOLERANCE = 5e-3
"""Of a float state that a long step in BF16 makes, relative to the norm."""
SMALL = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 8, "width": 4}


class Row(NamedTuple):
    """One sequence of the step."""

    past: int
    accepted: int
    new: int


def gated_delta_net_case(
    rows: Sequence[Row],
    steps: int,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    width: int,
    window: int = 4,
    ring: int = 0,
    dtype: torch.dtype = torch.float32,
    state: torch.dtype = torch.float32,
    gate: str = "sigmoid",
    keys: str = "free",
    decay: str = "normal",
    seed: int = 0,
) -> Case:
    """`keys`: "free", "near" (almost parallel) or "equal" for all tokens, the last two with beta at 1.

    `decay`: "normal", "strong" (to nothing, here and there), "infinite" (likewise), "long" or "none".
    """
    g = torch.Generator().manual_seed(seed)
    batch, slots = len(rows), len(rows) + 2
    channels, columns = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    values: dict[str, Any] = {
        "qkv": normal(g, batch, steps, channels, dtype=dtype),
        "z": normal(g, batch, steps, columns, dtype=dtype),
        "a": normal(g, batch, steps, value_heads, dtype=dtype),
        "b": normal(g, batch, steps, value_heads, dtype=dtype),
        "conv_weight": normal(g, channels, 1, width, dtype=dtype, scale=0.5),
        "A_log": normal(g, value_heads, scale=0.5),
        "dt_bias": normal(g, value_heads, scale=0.5),
        "norm_weight": 1 + normal(g, value_dim, scale=0.2),
        **_rows(g, rows, slots),
        "conv_state": normal(g, slots + 1, ring or window + width - 1, channels, dtype=dtype),
        "recurrent_state": normal(g, slots + 1, value_heads, key_dim, value_dim, dtype=state, scale=0.3),
        "pending_state": _pending(g, slots + 1, window, key_heads, value_heads, key_dim, value_dim),
    }
    _make_extreme(g, values, 2 * key_heads * key_dim, keys, decay)
    _make_dirty(values, rows)
    expected, ignored = _expected(values, steps, window, key_heads, gate)
    values |= {"y": poisoned(batch, steps, columns, dtype=dtype), "eps": 1e-6, "silu_gate": int(gate == "silu")}
    values |= {"key_heads": key_heads, "tickets": torch.zeros(batch, key_heads, dtype=torch.int32)}
    expected["tickets"] = values["tickets"].clone()
    by_chunks = dtype == torch.bfloat16 and steps > window and state == torch.float32
    return Case("gated_delta_net", values, expected, ignored, {"recurrent_state": STATE_TOLERANCE} if by_chunks else {})


def _rows(g: torch.Generator, rows: Sequence[Row], slots: int) -> dict[str, Tensor]:
    """Distinct slots in any order; rows without tokens are padding and share the last one."""
    order = torch.randperm(slots, generator=g)[: len(rows)].tolist()
    table = [
        (slot if row.new else slots, row.past, row.accepted, row.new) for slot, row in zip(order, rows, strict=True)
    ]
    return {
        name: torch.tensor(column, dtype=torch.int32)
        for name, column in zip(ROWS, zip(*table, strict=True), strict=True)
    }


def _pending(g: torch.Generator, rows: int, window: int, K: int, V: int, Dk: int, Dv: int) -> Tensor:
    """Pending tokens as a step leaves them: unit keys, log decays below 0, beta in (0, 1)."""
    k = torch.nn.functional.normalize(torch.randn(rows, window, K, Dk, generator=g), dim=-1).flatten(2)
    v = torch.randn(rows, window, V * Dv, generator=g)
    decay = -torch.rand(rows, window, V, generator=g)
    return torch.cat([k, v, decay, torch.rand(rows, window, V, generator=g)], -1)


def _make_extreme(g: torch.Generator, values: dict[str, Any], keys: int, kind: str, decay: str) -> None:
    """`keys`: the first channels, q's and k's."""
    qkv, a = values["qkv"], values["a"]
    if kind != "free":
        values["b"] += 20
    if kind == "equal":  # what a product form of the chunk's inverse fails on
        qkv[:] = qkv[:1, :1]
    if kind == "near":  # where rounded keys fail
        half = qkv[..., keys // 2 : keys]
        half[:] = half[:1, :1] + 0.05 * torch.randn(half.shape, generator=g)
    if decay in ("strong", "infinite"):
        a[torch.rand(a.shape, generator=g) < 0.3] += 1e4 if decay == "strong" else 3e38
    if decay in ("long", "none"):
        a -= 7 if decay == "long" else 30


def _make_dirty(values: dict[str, Any], rows: Sequence[Row]) -> None:
    """States of sequences that start now (and everything beyond what was accepted) hold NaN."""
    for slot, row in zip(values["slots"].tolist(), rows, strict=True):
        if row.new and row.past <= row.accepted:
            values["recurrent_state"][slot] = torch.nan
        if row.new and row.past == 0:
            values["conv_state"][slot] = torch.nan
        values["pending_state"][slot, row.accepted :] = torch.nan


def _expected(
    values: dict[str, Any], steps: int, window: int, key_heads: int, gate: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's outputs and states. Pending rows that nobody will read may hold anything."""
    inputs = [values[name].clone() for name in (*INPUTS, *ROWS, *STATES)]
    out = REFERENCES["GatedDeltaNet"]["default"](*inputs, eps=1e-6, key_heads=key_heads, gate=gate)
    expected = dict(zip(("y", *STATES), out, strict=True))
    ignored = torch.zeros_like(expected["pending_state"], dtype=torch.bool)
    for slot, new in zip(values["slots"].tolist(), values["new_len"].tolist(), strict=True):
        if new:
            ignored[slot, new if steps <= window else 0 :] = True
    return expected, {"pending_state": ignored}
