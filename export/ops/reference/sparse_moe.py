"""SparseMoE: softmax over the router's logits, the best `top_k` experts (ties to the lower index), weighted sum.

expert(x) = down(silu(gate x) * up x)

The forms differ in how an expert's weights are stored (`flashnext.export.number_formats`); the chosen experts'
weights are dequantized to float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export import number_formats
from flashnext.export.ops.reference.common import wide

Weights = Callable[[int], tuple[Tensor, Tensor]]
"""Gate and up [2, I, H], and down [H, I] of an expert."""


def route(router_logits: Tensor, top_k: int, normalize: int) -> tuple[Tensor, Tensor]:
    """Weights and expert indices [T, top_k] of router logits [T, experts]."""
    weights, experts = wide(router_logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), experts


def plain(
    x: Tensor, router_logits: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *, top_k: int, normalize: int
) -> Tensor:
    return _mix(x, router_logits, top_k, normalize, lambda e: (wide(gate_up_weight[e]), wide(down_weight[e])))


def fp8_block(
    x: Tensor,
    router_logits: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    *,
    top_k: int,
    normalize: int,
) -> Tensor:
    def weights(e: int) -> tuple[Tensor, Tensor]:
        return from_fp8_block(gate_up_weight[e], gate_up_scale[e]), from_fp8_block(down_weight[e], down_scale[e])

    return _mix(x, router_logits, top_k, normalize, weights)


def nvfp4(
    x: Tensor,
    router_logits: Tensor,
    gate_up_weight: Tensor,
    gate_up_scale: Tensor,
    gate_up_scale_2: Tensor,
    down_weight: Tensor,
    down_scale: Tensor,
    down_scale_2: Tensor,
    *,
    top_k: int,
    normalize: int,
) -> Tensor:
    def weights(e: int) -> tuple[Tensor, Tensor]:
        gate_up = from_nvfp4(gate_up_weight[e], gate_up_scale[e], gate_up_scale_2[e, :, None, None])
        return gate_up, from_nvfp4(down_weight[e], down_scale[e], down_scale_2[e])

    return _mix(x, router_logits, top_k, normalize, weights)


def from_fp8_block(weight: Tensor, scale: Tensor) -> Tensor:
    """Values of E4M3 codes […, R, C] with a scale for each block."""
    rows, columns = (torch.arange(size) // number_formats.BLOCK for size in weight.shape[-2:])
    return _e4m3(weight) * wide(scale)[..., rows[:, None], columns]


def from_nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Values […, C] of packed E2M1 codes […, C/2]."""
    values = torch.from_numpy(number_formats.E2M1_PAIRS)[packed.int()]
    groups = values.unflatten(-2, (scale.shape[-1], -1)).flatten(-2)
    scaled: Tensor = groups * (_e4m3(scale) * wide(scale_2))[..., None]
    return scaled.flatten(-2)


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _mix(x: Tensor, router_logits: Tensor, top_k: int, normalize: int, expert_weights: Weights) -> Tensor:
    tokens = wide(x).flatten(0, 1)
    weights, experts = route(router_logits.flatten(0, 1), top_k, normalize)
    y = torch.zeros_like(tokens)
    for expert in experts.unique().tolist():
        token, place = torch.where(experts == expert)
        gate_up, down = (w.to(tokens.dtype) for w in expert_weights(expert))
        gate, up = (tokens[token] @ w.T for w in gate_up)
        out = (functional.silu(gate) * up) @ down.T
        y.index_add_(0, token, out * weights[token, place, None])
    return y.view_as(x).to(x.dtype)
