"""Routed experts over whole batches: tokens sorted by expert, three products for each expert, scattered back.

The router's softmax, its choice and its renormalisation are those of the reference op; sorting makes each expert's
tokens one slice, so only chosen experts compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.export.config import ModelConfig
from flashnext.export.model import layers


class Experts(nn.Module):
    """The routed experts' weights in the checkpoint's fused form."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        width = c.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(c.num_experts, 2 * width, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.num_experts, c.hidden_size, width))


def sparse_moe(module: layers.SparseMoE, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Routed and shared experts on x [B, T, H].

    Returns the output, the balance loss (arXiv 2101.03961, equation 4: 1 when all experts are used alike) and the
    share of the choices that each expert got.
    """
    tokens = x.flatten(0, 1)
    probabilities = module.gate(tokens).softmax(-1)
    weights, chosen = probabilities.topk(int(module.attributes["top_k"]), dim=-1)
    if module.attributes["normalize"]:
        weights = weights / weights.sum(-1, keepdim=True)
    experts: Experts = module.experts  # type: ignore[assignment]
    routed = _mix(tokens, weights, chosen, experts)
    share = torch.bincount(chosen.flatten(), minlength=probabilities.shape[1]) / chosen.numel()
    balance = probabilities.shape[1] * (share * probabilities.mean(0)).sum()
    y = routed + torch.sigmoid(module.shared_expert_gate(tokens)) * module.shared_expert(tokens)
    return y.view_as(x), balance, share


def _mix(tokens: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.down_proj.shape[0]).tolist()
    token_of = order // chosen.shape[1]
    parts = tokens.index_select(0, token_of).split(counts)
    outputs = []
    for part, gate_up, down in zip(parts, experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = functional.linear(part, gate_up).chunk(2, dim=-1)
        outputs.append(functional.linear(functional.silu(gate) * up, down))
    weighted = torch.cat(outputs) * weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(tokens).index_add(0, token_of, weighted)
