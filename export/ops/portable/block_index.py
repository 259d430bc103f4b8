"""The indexer of SparseAttention: pooled block keys, scores, and the choice of a query's blocks.

A block of r tokens gets its key in the step that brings its last token, from the step's raw keys and those in the
ring. Scores are not negative, so -1 marks a block that a query may not choose yet.
"""

from __future__ import annotations

import math

from flashnext.export.ops.portable import common
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT, Ring, Rows
from flashnext.export.ops.portable.context import Context


def split(c: Context, turn: tuple[Value, Value]) -> tuple[Value, Value]:
    """Queries [B, S, Ni*Di] (norm, RoPE at their own position) and raw keys [B, S, Di] of the new tokens."""
    s = c.sizes
    width = s["Ni"] * s["Di"]
    heads = c["index_qk"][:, :, :width].cast(FLOAT).reshape(0, 0, s["Ni"], s["Di"])
    queries = common.rms_norm(heads, c["index_q_norm_weight"], c.number("eps"))
    return common.rotate(queries, turn, s["F"], s["Di"]).reshape(0, 0, width), c["index_qk"][:, :, width:]


def write(c: Context, rows: Rows, raw: Value) -> tuple[Value, Value]:
    """The ring and the block keys after the step."""
    s, r, body = c.sizes, c.integer("block"), c.body
    ring = Ring(c["index_tail_state"].gather(rows.slot, 0), s["Q"], rows)
    tail_state = common.write_slots(c["index_tail_state"], rows.slot, ring.after(raw))
    known = body.concat([ring.before(r - 1), raw], 1) if r > 1 else raw
    # Blocks from the one that holds the step's first token; `known` starts r - 1 tokens before that token.
    count = (raw.dim(1) + (r - 1)) // r
    first = rows.past // r
    offset = ((first * r - rows.past) + (r - 1)).unsqueeze(1) + body.arange(count * r)
    members = known.gather_nd(offset.op("Min", known.dim(1) - 1).unsqueeze(2), batch_dims=1)
    pooled = members.cast(FLOAT).reshape(0, -1, r, s["Di"]).reduce("Mean", 2)
    block = first.unsqueeze(1) + body.arange(count)
    turn = common.rotation(block * r, c["inv_freq"], c.number("rope_scale"))
    normed = common.rms_norm(pooled, c["index_k_norm_weight"], c.number("eps")).unsqueeze(2)
    keys = common.rotate(normed, turn, s["F"], s["Di"]).squeeze(2).cast(c.dtypes["T"])
    complete = (block + 1) * r <= rows.total.unsqueeze(1)
    place = complete.where(block, s["NB1"] - 1)
    return tail_state, c["index_key_state"].scatter_nd(common.pairs(rows.slot, place), keys)


def read(c: Context, rows: Rows, key_state: Value) -> Value:
    """Block keys [B, blocks, Di] up to the batch's longest context, at least one; some may be memory nobody wrote."""
    count = common.longest(rows.total // c.integer("block"))
    place = rows.slot.unsqueeze(1) * 0 + c.body.arange(count)
    return key_state.gather_nd(common.pairs(rows.slot, place)).cast(FLOAT)


def scores(c: Context, queries: Value, keys: Value, seen: Value) -> Value:
    """[B, T, blocks] for queries [B, T, Ni*Di] that see `seen` [B, T] tokens; -1 where a block is not complete."""
    s = c.sizes
    each = queries.reshape(0, -1, s["Di"]) @ keys.transpose(0, 2, 1)
    heads = each.op("Relu").reshape(0, -1, s["Ni"], keys.dim(1))
    complete = (c.body.arange(keys.dim(1)) + 1) * c.integer("block") <= seen.unsqueeze(2)
    return complete.where(heads.reduce("Sum", 2) / math.sqrt(s["Di"]), -1.0)


def best(c: Context, score: Value) -> tuple[Value, Value]:
    """Scores and indices of the chosen blocks, best first; TopK gives ties to the lower index."""
    count = score.dim(2).op("Min", c.sizes["budget_blocks"])
    top, blocks = c.body.node("TopK", [score, count], [FLOAT, "int64"], axis=-1)
    return top, blocks


def chosen(c: Context, score: Value) -> Value:
    """Mask [B, T, blocks] of the chosen blocks: better than the last one chosen, or as good and not after it."""
    top, blocks = best(c, score)
    bar, last = top[..., -1:], blocks[..., -1:]
    better = (score > bar) | (score.equal(bar) & (c.body.arange(score.dim(2)) <= last))
    return better & (score >= 0.0)


def of_last_token(c: Context, rows: Rows, queries: Value, keys: Value) -> Value:
    """Blocks [B, budget_blocks], int32, chosen for each row's last valid token; -1 where there is none."""
    last = (rows.new - 1).op("Max", 0).reshape(-1, 1, 1)
    score = scores(c, queries.gather_nd(last, batch_dims=1), keys, rows.total.unsqueeze(1))
    top, blocks = best(c, score)
    found = (top >= 0.0).where(blocks + 1, 0).squeeze(1)
    return (found.pad_end(1, c.sizes["budget_blocks"] - found.dim(1)) - 1).cast("int32")
