"""Qwen Sparse Attention over whole sequences by masks: dense, or over the blocks that the indexer chooses.

Besides the layer's output there is a record of what training looks at: the attention weights (the indexer's teacher)
and the indexer's block scores. Chosen blocks are a mask over tokens, so dense and sparse attention are the
same product; nothing is saved by sparsity here, and nothing can differ between the two but the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.model import layers
from flashnext.export.ops.reference.common import rms_norm, rotate

Mode = Literal["plain", "dense", "sparse"]
"""plain: dense attention without indexer or teacher, as dense pretraining needs it (several times as fast)."""


@dataclass(frozen=True)
class Attended:
    """What a layer's indexer is taught with, and how it chose."""

    weights: Tensor
    """[B, heads, T, T] attention weights, detached"""
    scores: Tensor
    """[B, T, blocks] indexer scores, -inf where a block is not complete; their gradients stop at the layer's input"""
    chosen: Tensor
    """[B, T, blocks] which blocks the indexer chooses (in both modes)"""


def sparse_attention(
    module: layers.SparseAttention, x: Tensor, inv_freq: Tensor, mode: Mode
) -> tuple[Tensor, Attended | None]:
    """The token mixer over whole sequences x [B, T, H] that start at position 0; no record in plain mode."""
    length, a = x.shape[1], module.attributes
    q, gate = module.q_proj(x).unflatten(-1, (int(a["heads"]), -1)).chunk(2, dim=-1)
    k, v = (p(x).unflatten(-1, (int(a["kv_heads"]), -1)) for p in (module.k_proj, module.v_proj))
    positions, eps, scale = torch.arange(length), float(a["eps"]), float(a["rope_scale"])
    q = rotate(rms_norm(q, module.q_norm.weight, eps), positions, inv_freq, scale)
    k = rotate(rms_norm(k, module.k_norm.weight, eps), positions, inv_freq, scale)
    q, k, v = _heads_first(q, k, v)
    if mode == "plain":
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return module.o_proj(_gated(y, gate)), None
    block = int(a["block"])
    scores = block_scores(module, x.detach(), inv_freq)
    chosen = choose(scores.detach(), int(a["budget_blocks"]))
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    if mode == "sparse":
        visible = visible & (tokens_of(chosen, length, block) | unfinished_tail(length, block))[:, None]
    weights = ((q * q.shape[-1] ** -0.5) @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1)
    return module.o_proj(_gated(weights @ v, gate)), Attended(weights.detach(), scores, chosen)


def block_scores(module: layers.SparseAttention, x: Tensor, inv_freq: Tensor) -> Tensor:
    """Scores [B, T, blocks] of all complete blocks; -inf where a block is not complete yet."""
    a, indexer = module.attributes, module.indexer
    block, eps, scale, dim = int(a["block"]), float(a["eps"]), float(a["rope_scale"]), int(a["index_head_dim"])
    index = indexer.index_qk_proj(x).unflatten(-1, (-1, dim))
    length, count = x.shape[1], x.shape[1] // block
    q = rotate(rms_norm(index[..., :-1, :], indexer.q_layernorm.weight, eps), torch.arange(length), inv_freq, scale)
    pooled = index[:, : count * block, -1].unflatten(1, (count, block)).mean(2)
    keys = rms_norm(pooled, indexer.k_layernorm.weight, eps)[:, :, None]
    keys = rotate(keys, torch.arange(count) * block, inv_freq, scale)[:, :, 0]
    scores = torch.relu(torch.einsum("bthd,bcd->bhtc", q, keys)).sum(1) / math.sqrt(dim)
    return scores.masked_fill(~complete_blocks(length, block), -torch.inf)


def complete_blocks(length: int, block: int) -> Tensor:
    """[T, blocks]: which blocks are complete for the query at each position."""
    ends = torch.arange(length // block) * block + block - 1
    return ends <= torch.arange(length)[:, None]


def choose(scores: Tensor, budget: int) -> Tensor:
    """[B, T, blocks]: the `budget` best complete blocks of each query; ties go to the lower index."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (scores > -torch.inf)


def tokens_of(blocks: Tensor, length: int, block: int) -> Tensor:
    """Mask [B, T, tokens] of the tokens in a mask [B, T, blocks]; tokens after the last whole block are in none."""
    tokens = blocks.repeat_interleave(block, dim=-1)
    return functional.pad(tokens, (0, length - tokens.shape[-1]))


def unfinished_tail(length: int, block: int) -> Tensor:
    """Mask [T, tokens] of the tokens from the last complete block's end on (causality is the caller's)."""
    position = torch.arange(length)
    return position >= ((position + 1) // block * block)[:, None]


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All [B, heads, T, D]; each key head serves consecutive query heads."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
    return q.transpose(1, 2), k, v


def _gated(y: Tensor, gate: Tensor) -> Tensor:
    return (y.transpose(1, 2) * torch.sigmoid(gate)).flatten(-2)
