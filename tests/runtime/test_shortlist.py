"""What the largest logits settle is what the whole row says, whatever the row and the wishes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.errors import EngineError
from flashnext.runtime.distribution import distribution
from flashnext.runtime.logits import SUM_ERROR, Floats
from flashnext.runtime.sampler import Sampler, top_logprobs
from flashnext.runtime.sampling_params import Sampling, SamplingParams
from flashnext.runtime.shortlist import Shortlist


class Row:
    """A row with its `count` largest logits; its sums are off by `error` times what they may be."""

    def __init__(self, logits: Floats, count: int, error: float = 0.0) -> None:
        self._logits, self._error = logits, error
        self.tokens = np.argsort(-logits, kind="stable")[:count].astype(np.int32)
        self.logits = logits[self.tokens]
        self.asked = 0

    def sum(self, temperature: float) -> float:
        wide = self._logits.astype(np.float64)
        with np.errstate(invalid="ignore"):
            exact = np.exp((wide - wide.max()) / temperature).sum()
        return float(exact * (1 + 0.99 * self._error * SUM_ERROR))

    def whole(self) -> Floats:
        self.asked += 1
        return self._logits

    def __len__(self) -> int:
        return len(self._logits)


def sampling(**values: Any) -> Sampling:
    return SamplingParams(**values).sampling({})


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Free logits, or ones with many equals; peaked or flat; 300 tokens, of which 1 to all are known."""
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from([0.5, 3.0, 20.0]))
    logits = (scale * generator.normal(size=300)).astype(np.float32)
    if draw(st.booleans()):
        logits = logits.round()
    return Row(logits, draw(st.sampled_from([1, 8, 64, 299, 300])), draw(st.sampled_from([-1.0, 0.0, 1.0])))


WISHES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0, 1e18]),
        "top_k": st.sampled_from([-1, -1, -1, 1, 5, 63, 64, 300]),
        "top_p": st.sampled_from([1.0, 1.0, 0.99, 0.5, 0.001]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.5]),
    }
)
PENALTIES = st.sampled_from(
    [
        {},
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": 0.3},
        {"presence_penalty": -0.5},
        {"frequency_penalty": -0.1},
    ]
)


@settings(max_examples=400, deadline=None)
@given(row=rows(), wishes=WISHES, penalties=PENALTIES, min_tokens=st.sampled_from([0, 0, 3]))
def test_the_same_tokens_with_the_same_weights(
    row: Row, wishes: dict[str, Any], penalties: dict[str, float], min_tokens: int
) -> None:
    """To the last bit, with bans, and with penalties on tokens that are among the largest and on others."""
    wishes |= penalties
    prompt = [int(row.tokens[0]), int(row.tokens[-1]), *range(20)]
    sampler = Sampler(sampling(**wishes), prompt, 1, [3, int(row.tokens[0])], min_tokens)
    if sampler._penalties:
        for token in prompt[1:]:  # as if they had been said
            sampler._penalties.add(token)
    short = sampler._short(row, changed=True)
    if short and sampler._sampling.greedy:
        assert short.best() in (None, sampler._likeliest(row.whole(), changed=True))
    elif short and (found := short.distribution(sampler._sampling)) is not None:
        tokens, weights = sampler._possible(row.whole(), changed=True)
        np.testing.assert_array_equal(found[0], tokens)
        np.testing.assert_array_equal(found[1], weights)
    ours, theirs = (Sampler(sampling(**wishes), prompt, 1, [3], min_tokens).sample(x) for x in (row, row.whole()))
    assert ours == theirs


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.0},
        {"top_k": 63},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.6},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.5},
        {"min_p": 0.05},
        {"temperature": 0.001},
        {"top_k": 20, "presence_penalty": 1.5},
    ],
)
def test_what_needs_no_whole_row(wishes: dict[str, Any]) -> None:
    row = Row((4 * np.random.default_rng(1).normal(size=5000)).astype(np.float32), 64)
    sampler = Sampler(sampling(**wishes), [int(row.tokens[2])], 1)
    for _ in range(20):
        sampler.sample(row)
    assert row.asked == 0


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"top_k": 64},
        {"top_p": 0.9999},
        {"top_p": 0.8, "repetition_penalty": 1.1},
        {"top_k": 5, "repetition_penalty": 0.9},
        {"top_k": 5, "presence_penalty": -0.1},
        {"top_k": 5, "frequency_penalty": -0.1},
        {"min_p": 1e-9},
    ],
)
def test_what_needs_the_whole_row(wishes: dict[str, Any]) -> None:
    row = Row((4 * np.random.default_rng(1).normal(size=5000)).astype(np.float32), 64)
    Sampler(sampling(**wishes), [int(row.tokens[2])], 1).sample(row)
    assert row.asked == 1


def test_equals_of_the_last_known_logit_are_looked_at() -> None:
    """Token 3 is as large as the last candidate; top-k keeps it, and a penalty on the others makes it the best."""
    logits = np.array([5, 4, 3, 3, 0], np.float32)
    row = Row(logits, 3)
    assert Shortlist.of(row).distribution(sampling(top_k=3)) is None  # type: ignore[union-attr]
    assert Shortlist.of(row).distribution(sampling(top_k=2)) is not None  # type: ignore[union-attr]
    banned = Sampler(sampling(temperature=0.0), [0], 1, [0, 1, 2], min_tokens=1)
    assert banned.sample(row) == 3
    assert row.asked == 1


def test_a_lowered_logit_beside_an_unknown_equal() -> None:
    """Penalties bring token 9 to 3 and token 1 below: token 2, which is no candidate, is the first of equals."""
    logits = np.zeros(10, np.float32)
    logits[[9, 1, 2]] = 6, 3, 3
    row = Row(logits, 2)
    assert Sampler(sampling(temperature=0.0, repetition_penalty=2.0), [9, 1], 1).sample(row) == 2
    assert row.asked == 1


def test_an_unknown_logit_that_a_penalty_raises() -> None:
    logits = np.array([5, 4, 3], np.float32)
    assert Sampler(sampling(temperature=0.0, repetition_penalty=0.5), [2], 1).sample(Row(logits, 2)) == 2


def test_weights_that_are_too_close_to_tell_apart() -> None:
    """At such a temperature all weights are 1, and top-p takes the lowest id, which is no candidate."""
    row = Row(np.arange(10, dtype=np.float32), 4)
    wishes = sampling(temperature=1e18, top_p=0.05)
    assert Shortlist.of(row).distribution(wishes) is None  # type: ignore[union-attr]
    assert Sampler(wishes, [1], 1).sample(row) == 0


def test_a_sum_that_leaves_two_answers_is_not_trusted() -> None:
    """The third token is needed or not, depending on the last digits of the sum."""
    logits = np.log(np.array([0.5, 0.3, 0.1, 0.06, 0.04])).astype(np.float32)
    edge = float(np.exp(logits[:2].astype(np.float64)).sum() / np.exp(logits.astype(np.float64)).sum())
    for top_p, settled in ((edge, False), (edge * (1 + 3 * SUM_ERROR), True), (edge * (1 - 3 * SUM_ERROR), True)):
        for error in (-1.0, 1.0):
            row = Row(logits, 4, error)
            found = Shortlist.of(row).distribution(sampling(top_p=top_p))  # type: ignore[union-attr]
            assert (found is not None) is settled
            if found:
                np.testing.assert_array_equal(found[0], distribution(logits, sampling(top_p=top_p))[0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_found(wrong: float) -> None:
    """Also where no candidate is one of them."""
    logits = np.full(20, wrong if wrong < 0 else 1.0, np.float32)
    logits[7] = wrong
    row = Row(logits, 4)
    row.tokens = np.array([1, 2, 3, 4], np.int32)
    with pytest.raises(EngineError, match="The model's logits hold"):
        Sampler(sampling(temperature=0.0), [1]).sample(row)


def test_log_probabilities_of_the_largest() -> None:
    row = Row(np.random.default_rng(2).normal(size=500).astype(np.float32), 16)
    for token, count, asked in ((int(row.tokens[5]), 3, 0), (int(row.tokens[0]), 16, 0), (int(row.tokens[15]), 0, 0)):
        ours, theirs = (top_logprobs(x, token, count) for x in (row, row._logits))
        assert [(t, p.rank) for t, p in ours.items()] == [(t, p.rank) for t, p in theirs.items()]
        np.testing.assert_allclose([p[0] for p in ours.values()], [p[0] for p in theirs.values()], atol=1e-9)
        assert row.asked == asked
    other = next(t for t in range(500) if t not in row.tokens)
    assert top_logprobs(row, other, 3) == top_logprobs(row._logits, other, 3)
    assert top_logprobs(row, int(row.tokens[0]), 17) == top_logprobs(row._logits, int(row.tokens[0]), 17)
    assert row.asked == 2
