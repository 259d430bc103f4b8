"""SparseMoE: softmax over the router's logits, the best `top_k` experts (ties to the lower index), weighted sum.

expert(x) = down(silu(gate x) * up x)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.ops.reference.common import wide


def route(router_logits: Tensor, top_k: int, normalize: int) -> tuple[Tensor, Tensor]:
    """Weights and expert indices [T, top_k] of router logits [T, experts]."""
    weights, experts = wide(router_logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), experts


def plain(
    x: Tensor, router_logits: Tensor, gate_up_weight: Tensor, down_weight: Tensor, *, top_k: int, normalize: int
) -> Tensor:
    tokens = wide(x).flatten(0, 1)
    weights, experts = route(router_logits.flatten(0, 1), top_k, normalize)
    y = torch.zeros_like(tokens)
    for expert in experts.unique().tolist():
        token, place = torch.where(experts == expert)
        gate, up = (tokens[token] @ wide(w).T for w in gate_up_weight[expert])
        out = (functional.silu(gate) * up) @ wide(down_weight[expert]).T
        y.index_add_(0, token, out * weights[token, place, None])
    return y.view_as(x).to(x.dtype)
