"""SparseAttention (QSA): norms, RoPE, cache update, block choice by the indexer, attention over the chosen tokens.

Keys, values, raw index keys and pooled block keys are addressed by position, so tokens of rejected drafts are simply
overwritten, and lengths decide what is visible. A block of r tokens gets its pooled key in the step that brings its
last token: mean of the raw keys in float32, RMSNorm, RoPE at the block's first position.

Codes of a cache in E4M3 are quotients by a layer's scale, rounded to nearest and saturated; `cache_scales` are those of
keys and of values. `fp8_cache` makes the forms with such caches.

Score of block b for the query at position i: sum_h relu(q_h . k_b) / sqrt(Di), only where the block is complete
(r*b + r - 1 <= i). ReLU makes exact ties at zero common: ties go to the LOWER block index.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashnext.export.ops import schema
from flashnext.export.ops.ports import CACHE_SCALES, CACHES
from flashnext.export.ops.reference.common import ring_history, ring_write, rms_norm, rotate, wide
from flashnext.export.ops.reference.residual_store import E4M3, quantize

UNSCALED = (1.0, 1.0)


def select(*inputs: Tensor, **attributes: float) -> tuple[Tensor, ...]:
    return select_return(*inputs, **attributes)[:-1]  # type: ignore[arg-type]


def select_return(
    q_gate: Tensor,
    k: Tensor,
    v: Tensor,
    index_qk: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    index_q_norm_weight: Tensor,
    index_k_norm_weight: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    key_state: Tensor,
    value_state: Tensor,
    index_tail_state: Tensor,
    index_key_state: Tensor,
    *,
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    index_heads: int,
    index_head_dim: int,
    block: int,
    budget_blocks: int,
    rope_scale: float,
    cache_scales: tuple[float, float] = UNSCALED,
) -> tuple[Tensor, ...]:
    y = torch.zeros(*q_gate.shape[:2], q_gate.shape[2] // 2, dtype=q_gate.dtype)
    blocks_out = torch.full((q_gate.shape[0], budget_blocks), -1, dtype=torch.int32)
    for row, (slot, past, new) in enumerate(zip(slots.tolist(), past_len.tolist(), new_len.tolist(), strict=True)):
        if new == 0:
            continue
        positions = torch.arange(past, past + new)
        query, gate = _queries(q_gate[row, :new], q_norm_weight, positions, inv_freq, head_dim, eps, rope_scale)
        _store_keys(key_state[slot], value_state[slot], k[row, :new], v[row, :new], k_norm_weight, positions, inv_freq,
                    kv_heads, eps, rope_scale, cache_scales)  # fmt: skip
        index = index_qk[row, :new].unflatten(-1, (-1, index_head_dim))
        _store_index_keys(index_tail_state[slot], index_key_state[slot], index[:, -1], index_k_norm_weight, past,
                          inv_freq, block, eps, rope_scale)  # fmt: skip
        index_query = rotate(rms_norm(index[:, :-1], index_q_norm_weight, eps), positions, inv_freq, rope_scale)
        chosen = choose_blocks(index_query, index_key_state[slot], positions, block, budget_blocks)
        count = min(budget_blocks, (past + new) // block)
        blocks_out[row, :count] = chosen[-1, :count].to(torch.int32)
        visible = visible_tokens(chosen, positions, (positions + 1) // block * block, block)
        y[row, :new] = _attend(query, gate, key_state[slot], value_state[slot], visible, cache_scales).to(y.dtype)
    return y, key_state, value_state, index_tail_state, index_key_state, blocks_out


def given(
    q_gate: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm_weight: Tensor,
    k_norm_weight: Tensor,
    inv_freq: Tensor,
    slots: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    key_state: Tensor,
    value_state: Tensor,
    blocks: Tensor,
    blocks_len: Tensor,
    *,
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    index_heads: int,
    index_head_dim: int,
    block: int,
    budget_blocks: int,
    rope_scale: float,
    cache_scales: tuple[float, float] = UNSCALED,
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.zeros(*q_gate.shape[:2], q_gate.shape[2] // 2, dtype=q_gate.dtype)
    for row, (slot, past, new) in enumerate(zip(slots.tolist(), past_len.tolist(), new_len.tolist(), strict=True)):
        if new == 0:
            continue
        positions = torch.arange(past, past + new)
        query, gate = _queries(q_gate[row, :new], q_norm_weight, positions, inv_freq, head_dim, eps, rope_scale)
        _store_keys(key_state[slot], value_state[slot], k[row, :new], v[row, :new], k_norm_weight, positions, inv_freq,
                    kv_heads, eps, rope_scale, cache_scales)  # fmt: skip
        tail_start = torch.full((new,), int(blocks_len[row]) // block * block)
        visible = visible_tokens(blocks[row].expand(new, -1).long(), positions, tail_start, block)
        y[row, :new] = _attend(query, gate, key_state[slot], value_state[slot], visible, cache_scales).to(y.dtype)
    return y, key_state, value_state


Reference = Callable[..., tuple[Tensor, ...]]


def fp8_cache(plain: str, reference: Reference) -> Reference:
    """The form `<plain>_fp8_cache`: codes, as bytes or as E4M3, and scales [1]."""
    ports = schema.op("SparseAttention").form(f"{plain}_fp8_cache")

    def run(*inputs: Tensor, **attributes: float) -> tuple[Tensor, ...]:
        given = {port.name: tensor for port, tensor in zip(ports.inputs, inputs, strict=True)}
        key_scale, value_scale = (float(given.pop(name)) for name in CACHE_SCALES)
        codes = {name: given[name].view(E4M3.dtype) for name in CACHES}
        results = reference(*(given | codes).values(), **attributes, cache_scales=(key_scale, value_scale))
        states = [ports.aliases.get(port.name) for port in ports.outputs]
        return tuple(given[state] if state else made for state, made in zip(states, results, strict=True))

    return run


def choose_blocks(index_query: Tensor, block_keys: Tensor, positions: Tensor, block: int, budget: int) -> Tensor:
    """Blocks chosen for each query, best first: [T, min(budget, complete blocks of the last query)], -1 for none.

    index_query [T, Ni, Di], block_keys [blocks, Di], positions [T] ascending.

    Summed in double and rounded once: a product in float32 may sum its last columns in another order than the others,
    and blocks with equal keys would no longer tie.
    """
    count = (int(positions[-1]) + 1) // block
    keys = block_keys[:count].double()
    sums = torch.relu(index_query.double() @ keys.T).sum(1) / math.sqrt(keys.shape[-1])
    scores = sums.float()
    complete = torch.arange(count)[None] * block + block - 1 <= positions[:, None]
    scores = scores.masked_fill(~complete, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :budget]
    return torch.where(complete.gather(-1, order), order, -1)


def visible_tokens(chosen: Tensor, positions: Tensor, tail_start: Tensor, block: int) -> Tensor:
    """Mask [T, tokens]: the tokens of the chosen blocks, and tail_start … position of each query."""
    tokens = int(positions[-1]) + 1
    blocks = torch.zeros(len(positions), tokens // block + 2, dtype=torch.bool)
    blocks.scatter_(1, torch.where(chosen >= 0, chosen, blocks.shape[1] - 1), True)
    in_block = blocks[:, :-1].repeat_interleave(block, dim=1)[:, :tokens]
    token = torch.arange(tokens)[None]
    return in_block | ((token >= tail_start[:, None]) & (token <= positions[:, None]))


def _queries(
    q_gate: Tensor, weight: Tensor, positions: Tensor, inv_freq: Tensor, head_dim: int, eps: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Rotated queries and raw gates, both [T, Nq, D]."""
    query, gate = q_gate.unflatten(-1, (-1, 2 * head_dim)).split(head_dim, dim=-1)
    return rotate(rms_norm(query, weight, eps), positions, inv_freq, scale), wide(gate)


def _store_keys(
    keys: Tensor,
    values: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    kv_heads: int,
    eps: float,
    scale: float,
    cache_scales: tuple[float, float],
) -> None:
    """Write the new tokens' keys (norm, RoPE) and values into one slot's caches [C1, Nkv, D]."""
    key = rotate(rms_norm(k.unflatten(-1, (kv_heads, -1)), weight, eps), positions, inv_freq, scale)
    value = v.unflatten(-1, (kv_heads, -1))
    step = slice(int(positions[0]), int(positions[-1]) + 1)
    if keys.dtype == E4M3.dtype:
        key, value = (quantize(x, torch.tensor(s)) for x, s in zip((key, value), cache_scales, strict=True))
    keys[step] = key.to(keys.dtype)
    values[step] = value.to(values.dtype)


def _store_index_keys(
    tail: Tensor,
    block_keys: Tensor,
    raw: Tensor,
    weight: Tensor,
    past: int,
    inv_freq: Tensor,
    block: int,
    eps: float,
    scale: float,
) -> None:
    """Pool the blocks that the new raw index keys [T, Di] complete, and keep the latest raw keys in the ring."""
    raw = raw.to(tail.dtype)
    first = past // block
    known = torch.cat([ring_history(tail, past, past % block), raw])
    count = known.shape[0] // block
    if count:
        pooled = wide(known[: count * block]).unflatten(0, (count, block)).mean(1)
        starts = (first + torch.arange(count)) * block
        key = rotate(rms_norm(pooled, weight, eps)[:, None], starts, inv_freq, scale)[:, 0]
        block_keys[first : first + count] = key.to(block_keys.dtype)
    ring_write(tail, past, raw)


def _attend(
    query: Tensor, gate: Tensor, keys: Tensor, values: Tensor, visible: Tensor, cache_scales: tuple[float, float]
) -> Tensor:
    """Softmax attention over the visible tokens, gated: [T, Nq*D]."""
    tokens = visible.shape[1]
    group = query.shape[1] // keys.shape[1]
    key = (wide(keys[:tokens]) * cache_scales[0]).repeat_interleave(group, dim=1)
    value = (wide(values[:tokens]) * cache_scales[1]).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,khd->thk", query, key) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    # A token that the softmax does not see weighs exactly 0; 0 * NaN would still be NaN.
    value = torch.where(visible.any(0)[:, None, None], value, 0.0)
    return (torch.einsum("thk,khd->thd", weights, value) * torch.sigmoid(gate)).flatten(1)
