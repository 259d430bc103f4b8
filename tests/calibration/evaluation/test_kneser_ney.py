"""The baseline is a distribution, knows its text, and agrees with the formula written out for one context."""

from __future__ import annotations

import numpy as np
import pytest

from flashnext.calibration.evaluation.kneser_ney import KneserNey

RNG = np.random.default_rng(1)
STREAM = np.minimum(RNG.geometric(0.3, 3000), 11)


@pytest.mark.parametrize("context", [[1, 2], [11, 10], [1, 1], [3, 0]])
def test_probabilities_sum_to_one(context: list[int]) -> None:
    model = KneserNey(STREAM, 12, order=3)
    total = sum(model.probabilities(np.array([*context, token]))[-1] for token in range(12))
    assert total == pytest.approx(1.0)


def test_formula_for_bigrams() -> None:
    tokens = np.array([0, 1, 0, 1, 0, 2, 1, 2])
    model = KneserNey(tokens, 4, order=2)
    top, low = model.orders[1], model.orders[0]
    # Bigrams 01 x2, 10 x2, 02, 21, 12; distinct predecessors: of 0: {1}, of 1: {0, 2}, of 2: {0, 1}; 5 in all.
    d = low.discounts
    single = (2 - d[2]) / 5 + (d[1] + 2 * d[2]) / 5 / 4
    t = top.discounts
    expected = (2 - t[2]) / 3 + (t[2] + t[1]) / 3 * single
    assert model.probabilities(np.array([0, 1]))[1] == pytest.approx(expected)
    unseen_context = model.probabilities(np.array([3, 1]))[1]
    assert unseen_context == pytest.approx(single)


def test_text_of_its_own_kind_is_likelier() -> None:
    model = KneserNey(np.tile([1, 2, 3, 4, 5, 6], 200), 12)
    known, other = np.array([1, 2, 3, 4, 5, 6]), np.array([1, 3, 2, 6, 4, 5])
    assert np.log(model.probabilities(known)).sum() > np.log(model.probabilities(other)).sum() + 5


def test_too_many_bits() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        KneserNey(STREAM, 1 << 13)
