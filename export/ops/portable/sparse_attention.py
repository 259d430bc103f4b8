"""SparseAttention in plain operators: norms, RoPE, cache writes, block choice, attention over the chosen tokens.

The caches are written first and read only from the writes' results, so that one buffer can be input and output. The
work follows the longest context of the batch, not the capacity. Up to W tokens per sequence (decode) gather the
chosen tokens' keys and values; more tokens (prefill) go through dense attention in which all other tokens are masked,
64 queries at a time. Form `given` gathers once per sequence, since all its queries share the blocks.

A query sees `seen` tokens: its position + 1, but never more than its row's total, so that a padded query reads
nothing that was not written. Memory of other tokens may hold NaN: their scores and values go through Where.

In the forms `…_fp8_cache` the caches hold E4M3 codes as bytes. Codes are picked before they are widened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashnext.export.ops.portable import block_index, common, fp8_codes
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, Rows
from flashnext.export.ops.portable.context import Context
from flashnext.export.ops.ports import CACHE_SCALES, CACHES, split_form

TILE = 64
"""Queries of a prefill tile: scores take heads * 64 * context floats."""
UNSEEN = -1e30
"""Score of a token that is not seen: finite, so that a query that sees nothing gets zeros, not NaN."""


def build(c: Context) -> dict[str, Value]:
    s, eps = c.sizes, c.number("eps")
    rows = common.step_rows(c["slots"], c["past_len"], c["new_len"], s["P"])
    position = common.positions(rows, c["q_gate"].dim(1))
    turn = common.rotation(position, c["inv_freq"], c.number("rope_scale"))
    both = c["q_gate"].cast(FLOAT).reshape(0, 0, s["Nq"], 2 * s["D"])
    query = common.rotate(common.rms_norm(both[..., : s["D"]], c["q_norm_weight"], eps), turn, s["F"], s["D"])
    query = query.reshape(0, 0, s["Nq"] * s["D"]) * s["D"] ** -0.5
    caches = _write(c, rows, position, turn)
    seen = (position + 1).op("Min", rows.total.unsqueeze(1))
    out = {"key_state_out": caches.keys, "value_state_out": caches.values}
    form = split_form(c.form)[0]
    if form == "given":
        heads = _given(c, caches, query, seen)
    else:
        index_query, raw = block_index.split(c, turn)
        out["index_tail_state_out"], out["index_key_state_out"] = block_index.write(c, rows, raw)
        block_keys = block_index.read(c, rows, out["index_key_state_out"])
        if form == "select_return":
            out["blocks_out"] = block_index.of_last_token(c, rows, index_query, block_keys)
        (heads,) = c.by_steps(
            query.dim(1) > s["W"],
            lambda: [_prefill(c, caches, query, index_query, block_keys)],
            lambda: [_decode(c, caches, query, index_query, block_keys, seen)],
        )
    gate = both[..., s["D"] :].reshape(0, 0, s["Nq"] * s["D"]).op("Sigmoid")
    return {**out, "y": (heads * gate).cast(c.dtypes["T"])}


# --- caches ------------------------------


@dataclass(frozen=True)
class Caches:
    """Keys and values [P, C1, Nkv, D] after the step's writes; `scales` [1] of both where they are codes."""

    heads: int
    columns: int
    rows: Rows
    keys: Value
    values: Value
    scales: tuple[Value, ...]

    def read(self, slot: Value, tokens: Value, present: Value) -> tuple[Value, Value]:
        """Keys and values [G, Nkv, N, D] of tokens [G, N] in slots [G]; values are 0 where not `present`."""
        token = present.where(tokens, 0).unsqueeze(1).expand(1, self.heads, 1)
        head = token.body.constant(np.arange(self.heads)[:, None], "int64")
        index = [slot.reshape(-1, 1, 1) + token * 0, token, head + token * 0]
        place = token.body.concat([i.unsqueeze(3) for i in index], 3)
        held = [state.gather_nd(place) for state in (self.keys, self.values)]
        if self.scales:
            wide = [fp8_codes.values(codes, self.columns, 3) for codes in held]  # [G, Nkv, N, D]
            held = [x * scale for x, scale in zip(wide, self.scales, strict=True)]
        keys, values = (x.cast(FLOAT) for x in held)
        return keys, present.unsqueeze(1, 3).where(values, 0.0)


def _write(c: Context, rows: Rows, position: Value, turn: tuple[Value, Value]) -> Caches:
    s = c.sizes
    valid = c.body.arange(c["k"].dim(1)) < rows.new.unsqueeze(1)
    place = common.pairs(rows.slot, valid.where(position, s["C1"] - 1))
    heads = [c[name].reshape(0, 0, s["Nkv"], s["D"]) for name in ("k", "v")]
    normed = common.rms_norm(heads[0].cast(FLOAT), c["k_norm_weight"], c.number("eps"))
    key, value = common.rotate(normed, turn, s["F"], s["D"]), heads[1]
    scales = tuple(c[name] for name in CACHE_SCALES) if split_form(c.form)[1] else ()
    if not scales:
        stored = [key.cast(c.dtypes["T"]), value]
    elif c.dtypes["C"] in fp8_codes.STORED:
        codes = [fp8_codes.rounded(x / scale) for x, scale in zip((key, value.cast(FLOAT)), scales, strict=True)]
        stored = [fp8_codes.packed(x, c.dtypes["C"], 3) for x in codes]  # [B, S, Nkv, D]
    else:
        raise ValueError(f"a portable SparseAttention takes E4M3 codes as bytes or words, not {c.dtypes['C']}")
    keys, values = (c[name].scatter_nd(place, x) for name, x in zip(CACHES, stored, strict=True))
    return Caches(s["Nkv"], s["D"], rows, keys, values, scales)


# --- which tokens a query sees ------------------------------


def _decode(c: Context, caches: Caches, query: Value, index_query: Value, block_keys: Value, seen: Value) -> Value:
    """Each query gathers its chosen tokens and the unfinished tail; every query is a group of its own."""
    top, blocks = block_index.best(c, block_index.scores(c, index_query, block_keys, seen))
    tokens = _with_tail(c, (top >= 0.0).where(blocks, -1), seen, c.integer("block") - 1)
    count, steps = tokens.dim(2), query.dim(1)
    tokens, present = (x.reshape(-1, count) for x in (tokens, tokens < seen.unsqueeze(2)))
    slot = caches.rows.slot.unsqueeze(1).expand(1, steps).reshape(-1)
    width = c.sizes["Nq"] * c.sizes["D"]
    keys, values = caches.read(slot, tokens, present)
    return _attend(c, query.reshape(-1, 1, width), keys, values, present.unsqueeze(1)).reshape(-1, steps, width)


def _given(c: Context, caches: Caches, query: Value, seen: Value) -> Value:
    """All queries of a row share the given blocks and the tokens from the first block that was not a candidate."""
    start = c["blocks_len"].cast("int64")
    reach = common.longest(caches.rows.total - start // c.integer("block") * c.integer("block"))
    tokens = _with_tail(c, c["blocks"].cast("int64").unsqueeze(1), start.unsqueeze(1), reach).squeeze(1)
    keys, values = caches.read(caches.rows.slot, tokens, tokens < caches.rows.total.unsqueeze(1))
    return _attend(c, query, keys, values, tokens.unsqueeze(1) < seen.unsqueeze(2))


def _with_tail(c: Context, blocks: Value, length: Value, tail: Value | int) -> Value:
    """Tokens of blocks [B, T, N] and `tail` more from the last block boundary of `length` [B, T].

    A block of -1 gives tokens after the capacity, which nobody sees.
    """
    r, body = c.integer("block"), c.body
    inside = (blocks >= 0).where(blocks * r, c.sizes["C1"]).unsqueeze(3) + body.arange(r)
    tokens = inside.reshape(0, 0, -1)
    if isinstance(tail, int) and tail == 0:
        return tokens
    return body.concat([tokens, (length // r * r).unsqueeze(2) + body.arange(tail)], 2)


def _prefill(c: Context, caches: Caches, query: Value, index_query: Value, block_keys: Value) -> Value:
    """Dense attention over the batch's longest context, masked: in tiles, or at once where the function has no branch.

    TensorRT for RTX cannot build a loop around sizes that depend on data; there the prefill chunk bounds the memory.
    """
    r, body, rows, steps = c.integer("block"), c.body, caches.rows, query.dim(1)
    token = body.arange(common.longest(rows.total))
    tokens = rows.slot.unsqueeze(1) * 0 + token
    keys, values = caches.read(rows.slot, tokens, tokens < rows.total.unsqueeze(1))
    block = (token // r).op("Min", block_keys.dim(1) - 1)

    def attend(queries: Value, index_queries: Value, offset: Value) -> Value:
        seen = (rows.past.unsqueeze(1) + offset + 1).op("Min", rows.total.unsqueeze(1))
        chosen = block_index.chosen(c, block_index.scores(c, index_queries, block_keys, seen))
        seen, tail = seen.unsqueeze(2), (seen // r * r).unsqueeze(2)
        visible = (chosen.gather(block, 2) & (token < tail)) | ((token >= tail) & (token < seen))
        return _attend(c, queries, keys, values, visible)

    if c.steps == "many":
        return attend(query, index_query, body.arange(steps))
    count = (steps + (TILE - 1)) // TILE
    tiles = [common.tiles(x, count, TILE) for x in (query, index_query)]

    def step(index: Value) -> tuple[list[Value], list[Value]]:
        query_tile, index_tile = (t.gather(index, 0) for t in tiles)
        return [], [attend(query_tile, index_tile, index * TILE + body.arange(TILE))]

    (y,) = body.loop(count, [], step)
    return y.transpose(1, 0, 2, 3).reshape(0, -1, c.sizes["Nq"] * c.sizes["D"])[:, :steps]


# --- attention ------------------------------


def _attend(c: Context, query: Value, keys: Value, values: Value, visible: Value) -> Value:
    """Softmax attention of queries [G, T, Nq*D] (scaled) over keys [G, Nkv, N, D] where visible [G, T, N]."""
    s, group = c.sizes, c.sizes["Nq"] // c.sizes["Nkv"]
    by_head = query.reshape(0, 0, s["Nkv"], group, s["D"]).transpose(0, 2, 3, 1, 4)
    # The query heads of a key head are rows of one product, so that its keys are read once.
    product = by_head.reshape(0, 0, -1, s["D"]) @ keys.transpose(0, 1, 3, 2)
    scores = visible.unsqueeze(1, 2).where(product.reshape(0, 0, group, -1, keys.dim(2)), UNSEEN)
    weights = scores.op("Softmax", axis=-1).reshape(0, 0, -1, keys.dim(2))
    out = (weights @ values).reshape(0, 0, group, -1, s["D"]).transpose(0, 3, 1, 2, 4)
    return out.reshape(0, 0, s["Nq"] * s["D"])
