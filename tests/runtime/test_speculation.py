"""Speculation over a model that only remembers: texts, counts, and what fails while drafting.

The drafters here guess wrong on purpose, at every place; the real ones run over the real model in `tests/parity`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from remembering_model import alone, request, start

from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.distribution import distribution
from flashnext.runtime.request import Request
from flashnext.runtime.sampler import Sampler
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.sequence import Sequence as TokenSequence
from flashnext.runtime.speculation.draft import Draft, Progress
from flashnext.runtime.speculation.draft_length import DRAFT_COST, VERIFY_COST, DraftLength
from flashnext.runtime.speculation.prompt_lookup import PromptLookup

MakeManifest = Callable[..., Manifest]
LOOKUP = {"drafter": "prompt-lookup", "draft_adaptive": False}


class Oracle:
    """Guesses from the texts as they will be, with the guess at each place in `wrong` spoilt."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: Callable[[int], bool]) -> None:
        self._texts, self._wrong = texts, wrong
        self.widths: list[int] = []

    def propose(self, rows: Sequence[Progress]) -> None:
        for row in rows:
            sequence = row.request.sequence
            known = len(sequence.tokens)
            (text,) = (t for t in self._texts if list(t[:known]) == sequence.tokens)
            ahead = text[known : known + row.request.drafts_wanted()]
            sequence.drafts = [Draft(t ^ 1 if self._wrong(known + i) else t) for i, t in enumerate(ahead)]
            self.widths.append(len(ahead))


def run_with(
    manifest: Manifest, wrong: Callable[[int], bool], prompts: list[list[int]], **params: Any
) -> list[Request]:
    texts = [p + alone(manifest, p, **params) for p in prompts]
    loop, scheduler, _ = start(manifest, drafters={"prompt-lookup": Oracle(texts, wrong)})
    requests = [request(manifest, p, **params, **LOOKUP, draft_tokens=3) for p in prompts]
    loop.run(requests)
    for asked, text in zip(requests, texts, strict=True):
        assert asked.sequence.tokens == text
    assert scheduler.free_slots == manifest.slots
    return requests


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_one_without_drafts_wherever_they_are_wrong(
    make_manifest: MakeManifest, temperature: float
) -> None:
    manifest = make_manifest()
    prompts = [[1, 2, 3], [9] * 17, [4], [5, 6] * 10, [7] * 5]
    settings = {"temperature": temperature, "seed": 5, "max_tokens": 9}
    for period, phase in itertools.product(range(1, 5), range(4)):
        run_with(manifest, lambda place, p=period, q=phase: (place + q) % p == 0, prompts, **settings)


def test_right_drafts_are_all_kept_and_counted(make_manifest: MakeManifest) -> None:
    (done,) = run_with(make_manifest(), lambda place: False, [[1, 2, 3]], max_tokens=9)
    counts = done.output().drafts
    # The first token comes with the prompt; then 4, and 4 of which the last is the ninth: 3 drafts for each.
    assert (counts.proposed, counts.kept, counts.steps) == (6, 6, 2)
    assert counts.acceptance_length == 4.0


def test_wrong_drafts_cost_steps_but_no_tokens(make_manifest: MakeManifest) -> None:
    (done,) = run_with(make_manifest(), lambda place: True, [[1, 2, 3]], max_tokens=9)
    counts = done.output().drafts
    assert counts.kept == 0
    assert counts.acceptance_length == 1.0
    assert counts.steps == 7  # none for the first token, and none behind the last


def test_a_stop_token_among_the_drafts_ends_the_text_there(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    free = alone(manifest, [1, 2, 3], max_tokens=9)
    for stop in free[1:]:
        (done,) = run_with(manifest, lambda place: False, [[1, 2, 3]], max_tokens=9, stop_token_ids=[stop])
        assert done.output().token_ids == free[: free.index(stop) + 1]
        assert done.output().finish_reason == "stop"


def test_penalties_and_log_probabilities_see_the_kept_drafts(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    params = {"max_tokens": 12, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "min_tokens": 5, "logprobs": 2}
    (done,) = run_with(manifest, lambda place: place % 4 == 0, [[1, 2, 3]], **params)
    loop, _, _ = start(manifest, chunk=64)
    plain = request(manifest, [1, 2, 3], **params)
    loop.run([plain])
    assert done.output().logprobs == plain.output().logprobs


def test_a_drafter_that_fails_ends_its_requests_alone(make_manifest: MakeManifest) -> None:
    class Broken:
        def propose(self, rows: Sequence[Progress]) -> None:
            raise EngineError("the draft layer broke")

    manifest = make_manifest()
    loop, scheduler, _ = start(manifest, drafters={"prompt-lookup": Broken()})
    healthy = request(manifest, [1, 2, 3])
    pieces = loop.stream(healthy)
    said = list(next(pieces).token_ids)
    with pytest.raises(EngineError, match="the draft layer broke"):
        loop.run([request(manifest, [4], draft_tokens=2, **LOOKUP)])
    assert said + [t for piece in pieces for t in piece.token_ids] == alone(manifest, [1, 2, 3])
    assert scheduler.free_slots == manifest.slots


def test_drafting_waits_for_the_end_of_the_prompt(make_manifest: MakeManifest) -> None:
    manifest = make_manifest()
    text = [9] * 17 + alone(manifest, [9] * 17)
    oracle = Oracle([text], lambda place: False)
    loop, _, _ = start(manifest, chunk=5, drafters={"prompt-lookup": oracle})
    loop.run([request(manifest, [9] * 17, draft_tokens=3, **LOOKUP)])
    assert oracle.widths[:4] == [0, 0, 0, 3]


# --- what a request may ask ------------------------------


def test_more_drafts_than_the_window_holds_are_refused(make_manifest: MakeManifest) -> None:
    with pytest.raises(RequestError, match=r"draft_tokens = 4, and this bundle verifies at most 3 .* --window 5"):
        request(make_manifest(), [1], draft_tokens=4, **LOOKUP)


def test_a_bundle_without_draft_layer_says_so(make_manifest: MakeManifest) -> None:
    with pytest.raises(RequestError, match="no draft layer"):
        request(make_manifest(), [1], draft_tokens=2)
    request(make_manifest(), [1], draft_tokens=2, drafter="prompt-lookup")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"draft_tokens": -1}, "draft_tokens = -1"),
        ({"draft_tokens": None}, "draft_tokens must be a whole number"),
        ({"drafter": "eagle"}, "drafter must be one of mtp, mtp-sampled, prompt-lookup"),
        ({"draft_adaptive": 1}, "draft_adaptive must be True or False"),
    ],
)
def test_wishes_out_of_range(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wishes)


# --- how many drafts ------------------------------


def test_draft_length_follows_what_is_kept() -> None:
    length = DraftLength(7, VERIFY_COST + DRAFT_COST)
    for _ in range(30):
        length.record(length.next(), length.next())
    assert length.next() == 7
    for _ in range(4):
        length.record(length.next(), 1)
    assert 1 <= length.next() < 7
    for _ in range(40):
        length.record(length.next(), 0) if length.next() else None
    assert length.off
    assert length.next() == 0


def test_draft_length_stays_where_it_may_not_adapt() -> None:
    length = DraftLength(3, 0.34, adaptive=False)
    for _ in range(50):
        length.record(3, 0)
    assert length.next() == 3
    assert DraftLength(0, 0.34).next() == 0


# --- looking up ------------------------------


class Asking:
    """As much of a request as a look-up needs."""

    def __init__(self, tokens: list[int], wanted: int) -> None:
        self.sequence, self._wanted = TokenSequence(tokens), wanted

    def drafts_wanted(self) -> int:
        return self._wanted


def looked_up(lookup: PromptLookup, asking: Asking) -> list[int]:
    lookup.propose([Progress(asking, 0, np.zeros(0))])  # type: ignore[arg-type]
    return [draft.token for draft in asking.sequence.drafts]


def test_lookup_finds_the_latest_and_longest_match() -> None:
    asking = Asking([1, 2, 9, 9, 1, 2, 8, 8, 1, 2], 3)
    assert looked_up(PromptLookup(), asking) == [8, 8, 1]
    assert looked_up(PromptLookup(), Asking([5, 1, 2, 7, 0, 3, 1, 2, 8, 5, 1, 2], 2)) == [7, 0]
    assert looked_up(PromptLookup(), Asking([1, 2, 3, 4], 3)) == []
    assert looked_up(PromptLookup(), Asking([3], 3)) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 39))
def test_an_index_that_grew_finds_what_a_fresh_one_finds(tokens: list[int], cut: int) -> None:
    lookup, asking = PromptLookup(), Asking(tokens[:cut], 4)
    looked_up(lookup, asking)
    asking.sequence.tokens.extend(tokens[cut:])
    assert looked_up(lookup, asking) == looked_up(PromptLookup(), Asking(tokens, 4))


# --- rejection sampling ------------------------------


def table(seed: int, vocabulary: int, depth: int) -> dict[tuple[int, ...], Any]:
    rng = np.random.default_rng(seed)
    contexts = [c for n in range(depth) for c in itertools.product(range(vocabulary), repeat=n)]
    return {c: rng.normal(size=vocabulary).astype(np.float32) for c in contexts}


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_p": 0.8}])
def test_drawn_drafts_leave_the_distribution_as_it_is(settings: dict[str, Any]) -> None:
    """20,000 texts of three tokens over three words, with two drawn drafts each: chi-square of all 27 texts."""
    vocabulary, draws = 3, 20_000
    wanted, guessed = table(1, vocabulary, 3), table(2, vocabulary, 3)
    params = SamplingParams(**settings).sampling({})
    texts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        sampler, text = Sampler(params, [0], seed), ()
        while len(text) < 3:
            drafts: list[Draft] = []
            while len(drafts) < 2 - len(text):
                drafts.append(sampler.draft(guessed[(*text, *(d.token for d in drafts))], len(drafts)))
            for draft in [*drafts, None]:
                token = sampler.sample(wanted[text], draft)
                text = (*text, token)
                if draft is None or token != draft.token:
                    break
        texts[text] += 1
    expected = {t: draws * _chance(t, wanted, settings) for t in itertools.product(range(vocabulary), repeat=3)}
    assert all(expected[t] > 0 for t in texts)
    possible = [t for t, e in expected.items() if e > 0]
    chi_square = sum((texts[t] - expected[t]) ** 2 / expected[t] for t in possible)
    # The 99.9 % quantile of chi-square with 26 degrees of freedom is 54.1; fewer possible texts have less.
    assert chi_square < 54.1


def _chance(text: tuple[int, ...], tables: dict[tuple[int, ...], Any], settings: dict[str, Any]) -> float:
    chance = 1.0
    for place, token in enumerate(text):
        tokens, weights = distribution(tables[text[:place]], SamplingParams(**settings).sampling({}))
        chance *= float(weights[tokens == token].sum() / weights.sum())
    return chance


def test_drawn_drafts_are_kept_as_often_as_the_distributions_overlap() -> None:
    wanted, guessed = (table(seed, 5, 1)[()] for seed in (3, 4))
    params = SamplingParams().sampling({})
    kept = 0
    for seed in range(20_000):
        sampler = Sampler(params, [0], seed)
        draft = sampler.draft(guessed, 0)
        kept += sampler.sample(wanted, draft) == draft.token
    p, q = (np.exp(row) / np.exp(row).sum() for row in (wanted.astype(float), guessed.astype(float)))
    overlap = np.minimum(p, q).sum()
    assert abs(kept / 20_000 - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / 20_000)


def test_a_broken_draft_layer_is_named() -> None:
    sampler = Sampler(SamplingParams().sampling({}), [0], 1)
    with pytest.raises(EngineError, match="logits hold nan"):
        sampler.draft(np.array([0.0, np.nan], np.float32), 0)
