"""What training minimises: next-token loss, and the two divergences that teach the indexer.

The indexer learns from the attention it will replace. Teacher: attention weights summed over heads, normalised to sum
1, the largest of each block's tokens taken, renormalised over blocks. Student: softmax of the indexer's scores. Stage
one compares them over all complete blocks; stage two only over the blocks that the indexer chose, both renormalised
there. Blocks that are not complete are never compared: they are visible without being chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 256
"""Rows of logits that exist at once: 256 x 4096 floats stay in a processor's cache."""


def token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the logits hidden @ weight.T against targets: hidden [N, H], weight [V, H]."""
    if not torch.is_grad_enabled():
        parts = zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        total = sum(functional.cross_entropy(h @ weight.T, t, reduction="sum") for h, t in parts)
        return torch.as_tensor(total) / len(targets)
    loss: Tensor = _RowwiseCrossEntropy.apply(hidden, weight, targets)  # type: ignore[no-untyped-call]
    return loss


class _RowwiseCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradients are computed on the way forward, a few rows at a time, so that the logits of a
    whole batch (the largest tensor of a small model by far) never exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            h, t = hidden[rows], targets[rows, None]
            logits = h @ weight.T
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += (log_sum - logits.gather(1, t)).sum()
            error = logits.sub_(log_sum).exp_()
            error.scatter_add_(1, t, error.new_full(t.shape, -1.0))
            hidden_grad[rows] = error @ weight
            weight_grad.addmm_(error.T, h)
        ctx.save_for_backward(hidden_grad.div_(len(targets)), weight_grad.div_(len(targets)))
        return total / len(targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None


def teacher(weights: Tensor, block: int, among: Tensor) -> Tensor:
    """The teacher's distribution over blocks [B, T, blocks] from attention weights [B, heads, T, T].

    `among` [B, T, blocks] (or [T, blocks]) says which blocks take part; a query without any has zeros.
    """
    total = weights.sum(1)
    total = total / total.sum(-1, keepdim=True)
    count = total.shape[-1] // block
    best = total[..., : count * block].unflatten(-1, (count, block)).amax(-1) * among
    return best / best.sum(-1, keepdim=True).clamp_min(1e-30)


def indexer_loss(weights: Tensor, scores: Tensor, block: int, among: Tensor) -> Tensor:
    """Mean KL(teacher || softmax of scores), both over the blocks in `among`, over the queries that have any.

    Stage one: `among` is every complete block. Stage two: the chosen blocks.
    """
    target = teacher(weights, block, among)
    has_any = among.any(-1).expand(target.shape[:-1])
    student = scores.masked_fill(~among, -torch.inf)[has_any].log_softmax(-1)
    target = target[has_any]
    # Terms of blocks that do not take part are 0 * -inf; where() keeps them out of the gradient too.
    taking_part = target > 0
    difference = target.clamp_min(1e-30).log() - torch.where(taking_part, student, 0.0)
    return torch.where(taking_part, target * difference, 0.0).sum(-1).mean()


def recall(weights: Tensor, chosen: Tensor, block: int, budget: int, complete: Tensor) -> Tensor:
    """Share of the teacher's `budget` best blocks that the indexer chose, over queries with more blocks than that."""
    crowded = complete.sum(-1) > budget
    if not crowded.any():
        return torch.tensor(1.0)
    target = teacher(weights, block, complete)[:, crowded]
    wanted = target.topk(budget, dim=-1).indices
    return chosen[:, crowded].gather(-1, wanted).float().mean()
