"""Sampling against values computed by hand, and against plain definitions over random logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.errors import EngineError
from flashnext.runtime import distribution as distribution_module
from flashnext.runtime.distribution import distribution
from flashnext.runtime.sampler import Penalties, Sampler, draw, top_logprobs, uniform
from flashnext.runtime.sampling_params import Sampling, SamplingParams


def sampling(**values: Any) -> Sampling:
    return SamplingParams(**values).sampling({})


def logits(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, np.float32)


def of_probabilities(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.log(np.array(values)).astype(np.float32)


def kept(row: Any, **values: Any) -> dict[int, float]:
    """Token to probability after the cuts."""
    tokens, weights = distribution(row, sampling(**values))
    return dict(zip(tokens.tolist(), (weights / weights.sum()).round(6).tolist(), strict=True))


def test_greedy_takes_the_lower_id_of_equals() -> None:
    assert Sampler(sampling(temperature=0.0), [0]).sample(logits(1, 5, 3, 5)) == 1
    assert Sampler(sampling(temperature=1e-6), [0]).sample(logits(0, 0, 0)) == 0


def test_temperature_scales_logits() -> None:
    assert kept(logits(0, 2), temperature=2.0) == {0: 0.268941, 1: 0.731059}


def test_top_k_keeps_equals_of_the_last() -> None:
    assert kept(logits(3, 1, 2, 1), top_k=1) == {0: 1.0}
    assert sorted(kept(logits(3, 1, 2, 2), top_k=2)) == [0, 2, 3]
    assert len(kept(logits(3, 1, 2, 2), top_k=-1)) == 4
    assert len(kept(logits(3, 1, 2, 2), top_k=99)) == 4


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    row = of_probabilities(0.1, 0.5, 0.15, 0.25)
    assert kept(row, top_p=0.45) == {1: 1.0}
    assert kept(row, top_p=0.7) == {1: 0.666667, 3: 0.333333}
    assert sorted(kept(row, top_p=0.8)) == [1, 2, 3]
    assert kept(row, top_p=1e-9) == {1: 1.0}


def test_top_p_breaks_ties_to_the_lower_id() -> None:
    assert sorted(kept(logits(0, 0, 0, 0), top_p=0.5)) == [0, 1]


def test_min_p_is_relative_to_the_most_likely() -> None:
    row = of_probabilities(0.1, 0.5, 0.15, 0.25)
    assert sorted(kept(row, min_p=0.29)) == [1, 2, 3]
    assert kept(row, min_p=1.0) == {1: 1.0}


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    row = of_probabilities(0.1, 0.5, 0.15, 0.25)
    assert kept(row, top_k=2, top_p=0.6) == {1: 1.0}  # 0.5 of 0.75 is 0.667
    assert sorted(kept(row, min_p=0.4, top_p=0.7)) == [1, 3]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.999), st.integers(1, 30), st.booleans())
def test_nucleus_of_a_large_vocabulary(seed: int, top_p: float, spread: int, crowded: bool) -> None:
    """The quick way by the largest 1,024 agrees with sorting everything, ties included."""
    rng = np.random.default_rng(seed)
    row = (rng.normal(size=5000) * spread / 10).astype(np.float32)
    row = np.round(row) if crowded else row
    tokens, _ = distribution(row, sampling(top_p=top_p))
    weights = np.exp(row.astype(np.float64) - row.max())
    order = np.lexsort((np.arange(len(row)), -weights))
    reached = np.cumsum(weights[order])
    count = int(np.searchsorted(reached, top_p * weights.sum())) + 1
    assert abs(len(tokens) - count) <= 1  # the two sums may round differently at the edge
    common = min(count, len(tokens))
    assert tokens[:common].tolist() == order[:common].tolist()


def test_penalties_by_hand() -> None:
    row = logits(2, -2, 4, 1)
    penalties = Penalties(sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), [0, 1])
    penalties.add(2)
    penalties.add(2)
    penalties.apply(row)
    # prompt only: repetition; output: 4 / 2 - 0.25 * 2 - 0.5; never seen: unchanged
    assert row.tolist() == [1.0, -4.0, 1.0, 1.0]


def test_penalties_of_a_prompt_token_that_is_said_again() -> None:
    row = logits(2, 0)
    penalties = Penalties(sampling(presence_penalty=1.0), [0])
    penalties.apply(row)
    assert row.tolist() == [2.0, 0.0]
    penalties.add(0)
    penalties.apply(row)
    assert row.tolist() == [1.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=300), st.integers(1, 5))
def test_penalties_count_every_token(said: list[int], prompt_length: int) -> None:
    prompt, output = said[:prompt_length], said[prompt_length:]
    penalties = Penalties(sampling(frequency_penalty=0.5), prompt)
    for token in output:
        penalties.add(token)
    row = np.zeros(100, np.float32)
    penalties.apply(row)
    assert row.tolist() == [-0.5 * output.count(token) for token in range(100)]


def test_stops_are_banned_until_min_tokens_came() -> None:
    sampler = Sampler(sampling(temperature=0.0), [0], stops=[1], min_tokens=2)
    assert [sampler.sample(logits(0, 9, 3)) for _ in range(3)] == [2, 2, 1]


def test_logits_are_not_changed() -> None:
    row = logits(2, 1, 3)
    sampler = Sampler(sampling(temperature=0.0, repetition_penalty=1.5), [2], stops=[1], min_tokens=1)
    sampler.sample(row)
    assert row.tolist() == [2, 1, 3]


def test_broken_logits_are_an_error() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(EngineError, match="weights or the engine are broken"):
            Sampler(sampling(temperature=0.0), [0]).sample(logits(0, bad, 3))


def test_equal_seeds_draw_equal_tokens_and_draws_are_independent_of_the_past() -> None:
    rows = np.random.default_rng(1).normal(size=(40, 50)).astype(np.float32)
    first, second = (Sampler(sampling(), [0], seed=7) for _ in range(2))
    assert [first.sample(r) for r in rows] == [second.sample(r) for r in rows]
    assert [uniform(7, i) for i in (3, 1, 2)] == [uniform(7, i) for i in (3, 1, 2)]
    assert len({uniform(s, i) for s in (-1, 0, 7) for i in range(100)}) == 300


def test_every_place_of_a_text_has_a_draw_of_its_own() -> None:
    """A draw that were the same at each place would still be equal for equal seeds."""
    sampler = Sampler(SamplingParams().sampling({}), [1], seed=5)
    said = [sampler.sample(np.zeros(1000, np.float32)) for _ in range(50)]
    assert said == [int(uniform(5, place) * 1000) for place in range(50)]


def test_draw_follows_the_weights() -> None:
    weights = np.array([0.0, 1.0, 0.0, 3.0])
    assert [draw(weights, f) for f in (0.0, 0.2499, 0.25, 0.999, 1.0)] == [1, 1, 3, 3, 3]
    counts = np.bincount([draw(weights, uniform(3, i)) for i in range(4000)], minlength=4)
    assert counts[[0, 2]].tolist() == [0, 0]
    assert abs(counts[3] - 3000) < 4 * np.sqrt(4000 * 0.25 * 0.75)


def test_logprobs_are_of_the_raw_distribution_best_first() -> None:
    row = of_probabilities(0.1, 0.5, 0.15, 0.25)
    found = top_logprobs(row, token=0, count=2)
    assert list(found) == [1, 3, 0]
    assert [p.rank for p in found.values()] == [1, 2, 4]
    assert [round(float(np.exp(p.logprob)), 5) for p in found.values()] == [0.5, 0.25, 0.1]
    assert list(top_logprobs(row, token=1, count=0)) == [1]
    assert len(top_logprobs(row, token=1, count=99)) == 4


def test_ranks_of_equals_follow_their_ids() -> None:
    found = top_logprobs(logits(1, 1, 1), token=1, count=3)
    assert {t: p.rank for t, p in found.items()} == {0: 1, 1: 2, 2: 3}


def test_the_quick_nucleus_is_meant_for_large_vocabularies() -> None:
    assert distribution_module.NUCLEUS_FIRST_TRY < 5000  # else the test above compares nothing
