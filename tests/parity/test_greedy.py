"""Greedy generation of 64 tokens equals transformers' `generate` token by token, on every configuration and engine.

The prompt holds eos tokens and is longer than the budget of most configurations; tokens are fed back one at a time, so
every state is carried over 64 steps. Two more sequences decode in the same batch.
"""

from __future__ import annotations

import pytest

from .configs import CASES, Case
from .driver import Sequences
from .references import greedy_reference, reference, runner_of

PROMPT = 70
COUNT = 64


@pytest.mark.parametrize("engine", ["torch:reference", "onnxruntime"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_tokens_equal_transformers(case: Case, engine: str) -> None:
    prompt, expected = greedy_reference(case, PROMPT, COUNT)
    sequences = Sequences(runner_of(case, engine))
    sequences.start(5, 0, 3)
    last = {5: reference(case, 65).tokens, 0: prompt, 3: reference(case, 3).tokens}
    answer: list[int] = []
    for _ in range(COUNT):
        logits = sequences.step(last)
        last = {slot: [int(rows[-1].argmax())] for slot, rows in logits.items()}
        answer += last[0]
    assert answer == expected
