"""Logits of our model equal transformers' within 2e-4 of the logits' deviation, on every configuration and engine.

Lengths: one token, less than a block, both sides of the GDN chunk (64), and far beyond budget and convolutions.
"""

from __future__ import annotations

import pytest

from .configs import CASES, Case
from .driver import score
from .references import LENGTHS, deviation, reference, runner_of

TOLERANCE = 2e-4


@pytest.mark.parametrize("engine", ["torch:reference", "onnxruntime"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, engine: str) -> None:
    found = {}
    for length in LENGTHS:
        expected = reference(case, length)
        found[length] = deviation(score(runner_of(case, engine), expected.tokens, slot=length % 3), expected.logits)
    print(f"{case.name}, {engine}: at most {max(found.values()):.1e} of the deviation")  # shown by pytest -rP
    assert max(found.values()) < TOLERANCE, found
