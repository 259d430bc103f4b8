"""Cases of SparseAttention: one step of sequences in slots on dirty memory, with the reference's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from kernel_checks import Case, assert_close, normal, poisoned
from torch import Tensor

from flashnext.export.ops.ports import CACHE_SCALES, CACHES
from flashnext.export.ops.reference import REFERENCES
from flashnext.plugins.host_library import HostKernels

SMALL = {
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "index_heads": 2,
    "index_head_dim": 8,
    "frequencies": 2,
    "block": 4,
    "budget_blocks": 3,
}
OFFICIAL = {
    "heads": 24,
    "kv_heads": 2,
    "head_dim": 256,
    "index_heads": 4,
    "index_head_dim": 128,
    "frequencies": 32,
    "block": 4,
    "budget_blocks": 512,
}
ATTRIBUTES = ("heads", "kv_heads", "head_dim", "index_heads", "index_head_dim", "block", "budget_blocks")
SELECT = (
    *("q_gate", "k", "v", "index_qk", "q_norm_weight", "k_norm_weight", "index_q_norm_weight", "index_k_norm_weight"),
    *("inv_freq", "slots", "past_len", "new_len"),
    *("key_state", "value_state", "index_tail_state", "index_key_state"),
)
GIVEN = (
    *("q_gate", "k", "v", "q_norm_weight", "k_norm_weight", "inv_freq", "slots", "past_len", "new_len"),
    *("key_state", "value_state", "blocks", "blocks_len"),
)


ONE_HEAD = SMALL | {"heads": 1, "kv_heads": 1, "head_dim": 8, "index_heads": 1}
FORMS = ("select", "select_return", "given")
PART_BLOCKS = 8192
"""kPartBlocks of sparse_attention/plan.h."""


class Row(NamedTuple):
    """One sequence of the step."""

    past: int
    new: int


def sparse_attention_case(
    form: str,
    rows: Sequence[Row],
    steps: int,
    *,
    capacity: int = 0,
    window: int = 4,
    dtype: torch.dtype = torch.float32,
    scores: str = "free",
    rope_scale: float = 1.0,
    score_bytes: int = 0,
    fp8_scales: tuple[float, float] | None = None,
    seed: int = 0,
    **sizes: int,
) -> Case:
    """`scores`: "free", "zero" (no index query meets a key), "equal" (all pooled keys alike) or "crowded".

    `fp8_scales` of keys and values make the caches E4M3.
    """
    g = torch.Generator().manual_seed(seed)
    values = _inputs(g, rows, steps, dtype, sizes)
    values |= _states(g, values["slots"], rows, capacity or max(r.past for r in rows) + steps, window, dtype, sizes)
    _shape_scores(values, scores, sizes)
    if form == "given":
        values |= _given_blocks(g, rows, sizes)
    attributes = {"eps": 1e-6, "rope_scale": rope_scale, **{name: sizes[name] for name in ATTRIBUTES}}
    names = GIVEN if form == "given" else SELECT
    values = {name: values[name] for name in names}
    cache = "_fp8_cache" if fp8_scales else ""
    if fp8_scales:
        values |= {name: values[name].to(torch.float8_e4m3fn) for name in CACHES}
        values |= {name: torch.tensor([s]) for name, s in zip(CACHE_SCALES, fp8_scales, strict=True)}
    out = REFERENCES["SparseAttention"][form + cache](*(tensor.clone() for tensor in values.values()), **attributes)
    states = [n for n in names if n.endswith("_state")]
    expected = dict(zip(("y", *states), out, strict=False))
    values |= {"y": poisoned(*expected["y"].shape, dtype=dtype)}
    if form == "select_return":
        expected["blocks_out"] = out[-1]
        values["blocks_out"] = poisoned(*out[-1].shape, dtype=torch.int32)
    unused = () if form == "given" else ("index_heads", "index_head_dim")
    sizes_given = {n: sizes[n] for n in ATTRIBUTES if n not in ("block", *unused)}
    return Case(
        "sparse_attention",
        {**values, **sizes_given, "block": sizes["block"], "eps": 1e-6, "rope_scale": rope_scale}
        | {"score_bytes": score_bytes}
        | {n: sizes[n] for n in unused},
        expected,
    )


def check(case: Case, kernels: HostKernels) -> None:
    """Blocks are a set: the reference lists them best first, the kernel in order."""
    outputs, _ = case.run(kernels)
    for name, want in case.expected.items():
        got = outputs[name]
        if name == "blocks_out":
            got, want = got.sort(-1).values, want.sort(-1).values
        assert_close(got, want, name)


def alone(case: Case, row: int) -> Case:
    """The same launch with this row only; its result is not there to be compared."""
    per_row = {"q_gate", "k", "v", "index_qk", "slots", "past_len", "new_len", "blocks", "blocks_len", "y"}
    values = {n: v[row : row + 1].contiguous() if n in per_row else v for n, v in case.values.items()}
    values.pop("blocks_out", None)
    return Case(case.op, values, {"y": case.expected["y"][row : row + 1]})


def _inputs(
    g: torch.Generator, rows: Sequence[Row], steps: int, dtype: torch.dtype, s: dict[str, int]
) -> dict[str, Any]:
    batch, slots = len(rows), len(rows) + 2
    order = torch.randperm(slots, generator=g)[:batch].tolist()
    table = [(slot if row.new else slots, row.past, row.new) for slot, row in zip(order, rows, strict=True)]
    columns = [torch.tensor(c, dtype=torch.int32) for c in zip(*table, strict=True)]
    weights = ("q_norm_weight", "k_norm_weight", "index_q_norm_weight", "index_k_norm_weight")
    dims = (s["head_dim"], s["head_dim"], s["index_head_dim"], s["index_head_dim"])
    return {
        "q_gate": normal(g, batch, steps, s["heads"] * 2 * s["head_dim"], dtype=dtype),
        "k": normal(g, batch, steps, s["kv_heads"] * s["head_dim"], dtype=dtype),
        "v": normal(g, batch, steps, s["kv_heads"] * s["head_dim"], dtype=dtype),
        "index_qk": normal(g, batch, steps, (s["index_heads"] + 1) * s["index_head_dim"], dtype=dtype),
        **{name: normal(g, dim, dtype=dtype, scale=0.2) for name, dim in zip(weights, dims, strict=True)},
        "inv_freq": 1e7 ** -(torch.arange(s["frequencies"]) / s["frequencies"]),
        **dict(zip(("slots", "past_len", "new_len"), columns, strict=True)),
    }


def _states(
    g: torch.Generator,
    slots: Tensor,
    rows: Sequence[Row],
    capacity: int,
    window: int,
    dtype: torch.dtype,
    s: dict[str, int],
) -> dict[str, Tensor]:
    """Random for what the sequences hold, NaN beyond."""
    count, block = len(rows) + 3, s["block"]
    blocks = capacity // block + 1
    states = {
        "key_state": normal(g, count, capacity + 1, s["kv_heads"], s["head_dim"], dtype=dtype),
        "value_state": normal(g, count, capacity + 1, s["kv_heads"], s["head_dim"], dtype=dtype),
        "index_tail_state": normal(g, count, block - 1 + window, s["index_head_dim"], dtype=dtype),
        "index_key_state": normal(g, count, blocks, s["index_head_dim"], dtype=dtype),
    }
    for slot, row in zip(slots.tolist(), rows, strict=True):
        states["key_state"][slot, row.past :] = torch.nan
        states["value_state"][slot, row.past :] = torch.nan
        states["index_key_state"][slot, row.past // block :] = torch.nan
        if row.past == 0:
            states["index_tail_state"][slot] = torch.nan
    return states


def _shape_scores(values: dict[str, Any], scores: str, s: dict[str, int]) -> None:
    keys = values["index_key_state"]
    if scores == "zero":
        values["index_q_norm_weight"].fill_(-1)  # queries of zeros
    if scores == "equal":
        keys[:] = torch.where(keys.isnan(), keys, keys[:1, :1])
    if scores == "crowded":  # a few values, most of them alike
        keys[:] = torch.where(keys.isnan() | (keys > 2), keys, keys[:1, :1])


def _given_blocks(g: torch.Generator, rows: Sequence[Row], s: dict[str, int]) -> dict[str, Tensor]:
    """Random blocks of what was there when they were chosen: some steps ago."""
    chosen = torch.full((len(rows), s["budget_blocks"]), -1, dtype=torch.int32)
    seen = [max(row.past - 2, 0) for row in rows]
    for row, length in enumerate(seen):
        blocks = torch.randperm(length // s["block"], generator=g)[: s["budget_blocks"]]
        chosen[row, : len(blocks)] = blocks.int()
    return {"blocks": chosen, "blocks_len": torch.tensor(seen, dtype=torch.int32)}
