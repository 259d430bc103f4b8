"""Saved states of prompt starts: bit by bit what they were, found by the longest start, forgotten in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.errors import RequestError
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.prefix_cache import PrefixCache
from flashnext.runtime.sequence import Sequence

BLOCK = 4
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DRAFTING = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, draft_tokens=3, draft_adaptive=False)


def states() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "layers.0.recurrent_state": (3, 2, 4),
        "layers.3.key_state": (3, 65, 2),
        "layers.3.index_key_state": (3, 17, 2),
        "mtp.layers.0.key_state": (3, 65, 2),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def sequence(tokens: list[int], slot: int, past: int = 0, pending: int = 0, fed: int = 0) -> Sequence:
    out = Sequence(tokens, slot=slot, past=past)
    out.pending, out.fed = pending, fed
    return out


def cache_of(arrays: dict[str, Any], limit: int = 1 << 20) -> PrefixCache:
    return PrefixCache(arrays, BLOCK, limit)


def test_a_start_comes_back_bit_by_bit_into_another_slot() -> None:
    arrays = states()
    before = {name: array.copy() for name, array in arrays.items()}
    cache = cache_of(arrays)
    cache.save(sequence(list(range(20)), 0, past=19, pending=3, fed=19))
    for array in arrays.values():
        array[0] = -1
    again = sequence([*range(19), 77, 78], 2)
    cache.restore(again)
    assert (again.past, again.pending, again.fed, again.cached) == (19, 3, 19, 19)
    for name, array in arrays.items():
        used = {"key_state": 19, "index_key_state": 19 // BLOCK}.get(name.rsplit(".", 1)[-1], array.shape[1])
        np.testing.assert_array_equal(array[2][:used], before[name][0][:used])
        np.testing.assert_array_equal(array[2][used:], before[name][2][used:])
        np.testing.assert_array_equal(array[1], before[name][1])


def test_the_longest_start_wins_and_a_token_is_left_to_run() -> None:
    cache = cache_of(states())
    for past in (4, 8, 12):
        cache.save(sequence(list(range(past + 1)), 0, past=past))
    for length, expected in [(3, 0), (4, 0), (5, 4), (12, 8), (13, 12), (30, 12)]:
        asking = sequence(list(range(length)), 1)
        cache.restore(asking)
        assert asking.past == expected
    other = sequence([9, *range(1, 30)], 1)
    cache.restore(other)
    assert other.past == other.cached == 0


def test_drafting_needs_a_draft_layer_that_has_kept_up() -> None:
    cache = cache_of(states())
    cache.save(sequence(list(range(9)), 0, past=8, fed=5))
    plain, drafting = sequence(list(range(9)), 1), sequence(list(range(9)), 2)
    drafting.drafted = True
    cache.restore(plain)
    cache.restore(drafting)
    assert (plain.past, drafting.past) == (8, 0)
    cache.save(sequence(list(range(9)), 0, past=8, fed=8))
    cache.restore(drafting)
    assert (drafting.past, drafting.fed) == (8, 8)


def test_the_least_recently_used_is_forgotten_within_the_limit() -> None:
    arrays = states()
    probe = cache_of(arrays)
    probe.save(sequence([0] * 9, 0, past=8))
    cache = cache_of(arrays, limit=2 * probe.used_bytes)
    for first in (1, 2):
        cache.save(sequence([first] * 9, 0, past=8))
    cache.restore(sequence([1] * 9, 1))
    cache.save(sequence([3] * 9, 0, past=8))
    assert len(cache) == 2
    assert cache.used_bytes <= 2 * probe.used_bytes
    found = []
    for first in (1, 2, 3):
        asking = sequence([first] * 9, 1)
        cache.restore(asking)
        found.append(asking.past)
    assert found == [8, 0, 8]
    cache.save(sequence(list(range(50)), 0, past=49))  # larger than what is left, not than the limit
    assert cache.used_bytes <= 2 * probe.used_bytes
    assert len(cache_of(arrays, limit=10)) == 0


def test_ends_of_chunks_are_saved_when_a_second_prompt_reaches_them() -> None:
    cache = cache_of(states())
    for expected in (0, 1, 1):
        cache.save_chunk(sequence(list(range(20)), 0, past=8))
        assert len(cache) == expected
    off = cache_of(states(), limit=0)
    off.save_chunk(sequence(list(range(20)), 0, past=8))
    off.save(sequence(list(range(20)), 0, past=8))
    assert len(off) == 0


@pytest.mark.parametrize("params", [GREEDY, DRAFTING], ids=["plain", "drafting"])
def test_texts_are_the_same_and_starts_are_not_run_again(random_bundle: Path, params: SamplingParams) -> None:
    rng = np.random.default_rng(4)
    system = rng.integers(10, 500, 40).tolist()
    prompts = [system + rng.integers(10, 500, n).tolist() for n in (5, 9, 3)]
    with LLM(random_bundle, threads=1, prefill_chunk=16) as plain:
        expected = [o.token_ids for o in plain.generate(prompts, params)]
        follow_up = prompts[0] + expected[0] + [11, 12, 13]
        expected_next = plain.generate([follow_up], params)[0].token_ids
    with LLM(random_bundle, threads=1, prefill_chunk=16, prefix_cache_bytes=64 << 20) as llm:
        first, second, third = (llm.generate([prompt], params)[0] for prompt in prompts)
        assert [o.token_ids for o in (first, second, third)] == expected
        assert first.cached_tokens == 0
        assert third.cached_tokens == 32  # the chunks that the first two prompts have in common
        repeated = llm.generate([prompts[0]], params)[0]
        assert repeated.token_ids == expected[0]
        assert repeated.cached_tokens >= 32
        turn = llm.generate([follow_up], params)[0]
        assert turn.token_ids == expected_next
        # The end of the generation, of which the last token was sampled and perhaps run as a draft.
        assert turn.cached_tokens in (len(prompts[0]) + 5, len(prompts[0]) + 6)


def test_what_is_no_amount_of_memory(random_bundle: Path) -> None:
    for wrong in (-1, 1.5, True, "1G"):
        with pytest.raises(RequestError, match="prefix_cache_bytes"):
            LLM(random_bundle, prefix_cache_bytes=wrong)  # type: ignore[arg-type]
