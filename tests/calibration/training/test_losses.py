"""The losses against values computed by hand, and against their plain forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from flashnext.calibration.training.attention import choose, complete_blocks, tokens_of, unfinished_tail
from flashnext.calibration.training.losses import ROWS, indexer_loss, recall, teacher, token_loss

BLOCK = 2
WEIGHTS = torch.zeros(1, 2, 6, 6)
"""Two heads, six tokens: three blocks. Only the rows that a test looks at are filled."""
WEIGHTS[0, 0, 5] = torch.tensor([0.1, 0.3, 0.1, 0.1, 0.2, 0.2])
WEIGHTS[0, 1, 5] = torch.tensor([0.3, 0.1, 0.3, 0.1, 0.0, 0.2])
WEIGHTS[:, :, 3] = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.0, 0.0])
WEIGHTS[:, :, :3, 0] = WEIGHTS[:, :, 4, 0] = 1.0
# Row 5, summed over heads and divided by 2: .2 .2 .2 .1 .1 .2; largest of each block: .2 .2 .2; renormalised: thirds.
# Row 3: .4 .3 (block 2 does not exist yet), renormalised 4/7, 3/7.


def divergence(target: list[float], scores: list[float]) -> float:
    total = math.log(sum(math.exp(s) for s in scores))
    return sum(t * (math.log(t) - (s - total)) for t, s in zip(target, scores, strict=True) if t)


def test_teacher() -> None:
    found = teacher(WEIGHTS, BLOCK, complete_blocks(6, BLOCK))[0]
    assert found[5].tolist() == pytest.approx([1 / 3] * 3)
    assert found[3].tolist() == pytest.approx([4 / 7, 3 / 7, 0])
    assert found[1].tolist() == pytest.approx([1, 0, 0])
    assert found[0].tolist() == [0, 0, 0]  # no block is complete at the first token


def test_loss_of_stage_one() -> None:
    scores = torch.zeros(1, 6, 3)
    scores[0, 5] = torch.tensor([1.0, 0.0, 2.0])
    scores[0, 3] = torch.tensor([0.5, 1.5, 9.0])
    expected = [
        0.0,  # positions 1 and 2: one complete block, nothing to choose
        0.0,
        divergence([4 / 7, 3 / 7], [0.5, 1.5]),
        divergence([1.0], [0.0]) + math.log(2),  # position 4: all attention on the first of two blocks
        divergence([1 / 3] * 3, [1.0, 0.0, 2.0]),
    ]
    found = indexer_loss(WEIGHTS, scores, BLOCK, complete_blocks(6, BLOCK))
    assert found.item() == pytest.approx(sum(expected) / 5, rel=1e-5)


def test_loss_of_stage_two_looks_at_the_chosen_blocks_only() -> None:
    scores = torch.zeros(1, 6, 3)
    scores[0, 5] = torch.tensor([1.0, 0.0, 2.0])
    scores[0, 3] = torch.tensor([0.5, 1.5, 9.0])
    chosen = torch.zeros(1, 6, 3, dtype=torch.bool)
    chosen[0, 5, [0, 2]] = True
    chosen[0, 3, 1] = True
    expected = [divergence([0.5, 0.5], [1.0, 2.0]), 0.0]
    found = indexer_loss(WEIGHTS, scores, BLOCK, chosen)
    assert found.item() == pytest.approx(sum(expected) / 2, rel=1e-5)


def test_indexer_loss_has_finite_gradients() -> None:
    scores = torch.randn(1, 6, 3).masked_fill(~complete_blocks(6, BLOCK), -torch.inf).requires_grad_()
    indexer_loss(WEIGHTS, scores, BLOCK, complete_blocks(6, BLOCK)).backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    # softmax minus teacher, at the last of the five queries that count
    difference = (scores[0, 5].softmax(-1) - 1 / 3) / 5
    torch.testing.assert_close(scores.grad[0, 5], difference.detach())


def test_recall_counts_crowded_queries() -> None:
    weights = WEIGHTS.clone()
    weights[:, :, 5] = torch.tensor([0.5, 0.0, 0.1, 0.1, 0.3, 0.0])
    chosen = torch.zeros(1, 6, 3, dtype=torch.bool)
    chosen[0, 5, :2] = True
    assert recall(weights, chosen, BLOCK, 2, complete_blocks(6, BLOCK)).item() == 0.5
    assert recall(weights, chosen, BLOCK, 3, complete_blocks(6, BLOCK)).item() == 1.0


def test_chosen_blocks_and_the_unfinished_tail() -> None:
    scores = torch.tensor([[[1.0, 1.0, 0.0]]]).expand(1, 7, 3).masked_fill(~complete_blocks(7, BLOCK), -torch.inf)
    chosen = choose(scores, 1)
    assert chosen[0, 6].tolist() == [True, False, False]  # a tie goes to the lower block
    assert not chosen[0, 0].any()
    visible = tokens_of(chosen, 7, BLOCK) | unfinished_tail(7, BLOCK)
    assert visible[0, 6].tolist() == [True, True, False, False, False, False, True]
    assert visible[0, 5].tolist() == [True, True, False, False, False, False, True]  # causality is not its business


def test_token_loss_and_its_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS + 30, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 50, (ROWS + 30,), generator=generator)
    plain = functional.cross_entropy(hidden @ weight.T, targets)
    expected = torch.autograd.grad(plain * 3, (hidden, weight))
    loss = token_loss(hidden, weight, targets)
    found = torch.autograd.grad(loss * 3, (hidden, weight))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        torch.testing.assert_close(token_loss(hidden, weight, targets), plain)
