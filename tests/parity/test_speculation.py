"""Greedy text with speculation equals greedy text without, token for token, over the real model.

Drafts come from the draft layer, and from the text itself with wrong guesses at every place; batches
hold sequences of different lengths and ends, and slots are used again and again. Whatever a rejected draft left behind,
in a state or in an n-gram history, would change a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.request import Request
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.speculation.draft import Draft, Drafter, Progress
from flashnext.runtime.speculation.mtp_drafter import MtpDrafter

from .configs import BASE, BY_NAME, CASES, Case
from .references import SLOTS, WINDOW, oracle_of, runner_of

CHUNK = 20
LENGTHS = (1, 3, 9, 21, 40, 66, 5, 70)
ENDS = (9, 14, 11, 25, 16, 12, 22, 10)
SPOILT = {"draft_tokens": WINDOW - 1, "draft_adaptive": False, "drafter": "prompt-lookup"}
each_engine = pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Spoilt:
    """The text as it will be, with wrong guesses wherever `wrong` says so."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: Callable[[int], bool]) -> None:
        self._texts, self._wrong = texts, wrong

    def propose(self, rows: Sequence[Progress]) -> None:
        for row in rows:
            sequence = row.request.sequence
            known = len(sequence.tokens)
            text = next(t for t in self._texts if list(t[:known]) == sequence.tokens)
            ahead = text[known : known + row.request.drafts_wanted()]
            sequence.drafts = [
                Draft((t + 1) % BASE["vocab_size"] if self._wrong(known + i) else t) for i, t in enumerate(ahead)
            ]


def run(case: Case, engine: str, prompts: Sequence[Sequence[int]], guesser: Drafter, **params: Any) -> list[Request]:
    """All prompts through one loop over as many slots as the bundle has."""
    runner = runner_of(case, engine)
    loop = DecodeLoop(runner, Scheduler(SLOTS, WINDOW, CHUNK), {"prompt-lookup": guesser, "mtp": guesser})
    requests = [
        Request(runner.manifest, p, SamplingParams(max_tokens=ends, temperature=0.0, ignore_eos=True, **params), None)
        for p, ends in zip(prompts, ENDS, strict=False)
    ]
    loop.run(requests)
    return requests


def prompts_of(case: Case, seed: int = 0) -> list[list[int]]:
    return [oracle_of(case).text(n, seed=300 + 10 * seed + n) for n in LENGTHS]


@lru_cache(maxsize=8)
def plain_texts(case: Case, engine: str, seed: int = 0) -> list[list[int]]:
    """Without speculation, and one at a time, so that nothing but the prompt can decide the text."""
    runner, texts = runner_of(case, engine), []
    for prompt, ends in zip(prompts_of(case, seed), ENDS, strict=True):
        params = SamplingParams(max_tokens=ends, temperature=0.0, ignore_eos=True)
        request = Request(runner.manifest, prompt, params, None)
        DecodeLoop(runner, Scheduler(SLOTS, WINDOW, CHUNK)).run([request])
        texts.append(request.sequence.tokens)
    return texts


def check_draft_layer(case: Case, engine: str, count: int, prompts: int = len(LENGTHS)) -> None:
    guesser = MtpDrafter(runner_of(case, engine), reuse_blocks=count % 3 != 0)
    requests = run(case, engine, prompts_of(case)[:prompts], guesser, draft_tokens=count, draft_adaptive=False)
    assert [r.sequence.tokens for r in requests] == plain_texts(case, engine)[:prompts]
    assert sum(r.output().drafts.proposed for r in requests) > 0


def check_wrong_drafts(case: Case, engine: str, period: int, phase: int, prompts: int = len(LENGTHS)) -> None:
    texts = plain_texts(case, engine)[:prompts]
    guesser = Spoilt(texts, lambda place: (place + phase) % period == 0)
    requests = run(case, engine, prompts_of(case)[:prompts], guesser, **SPOILT)
    assert [r.sequence.tokens for r in requests] == texts


@pytest.mark.parametrize("count", range(1, WINDOW))
def test_any_number_of_drafts_changes_nothing(count: int) -> None:
    check_draft_layer(BY_NAME["official"], "onnxruntime", count)


@pytest.mark.parametrize("case", [c for c in CASES if c.has_mtp], ids=lambda case: case.name)
def test_drafts_of_the_draft_layer_change_nothing(case: Case) -> None:
    check_draft_layer(case, "onnxruntime", 3, prompts=4)


@each_case
def test_wrong_drafts_change_nothing(case: Case) -> None:
    check_wrong_drafts(case, "onnxruntime", 3, 1, prompts=4)


def test_speculation_in_the_reference_engine() -> None:
    check_draft_layer(BY_NAME["official"], "torch", 2, prompts=3)
    check_wrong_drafts(BY_NAME["official"], "torch", 3, 1, prompts=3)


@pytest.mark.slow
@each_engine
@pytest.mark.parametrize("case", [c for c in CASES if c.has_mtp], ids=lambda case: case.name)
def test_any_number_of_drafts_on_every_configuration(case: Case, engine: str) -> None:
    for count in range(1, WINDOW):
        check_draft_layer(case, engine, count)


@pytest.mark.slow
@each_engine
@each_case
def test_wrong_drafts_at_every_place_of_every_configuration(case: Case, engine: str) -> None:
    for period, phase in [(1, 0), (2, 0), (2, 1), (3, 1), (5, 2), (8, 7)]:
        check_wrong_drafts(case, engine, period, phase)


@pytest.mark.slow
def test_two_thousand_sequences_of_forced_rejections() -> None:
    """Every sequence has its own pattern of wrong guesses; together they reject at every place of the window."""
    case, engine = BY_NAME["official"], "onnxruntime"
    rejected = 0
    for number in range(2000 // len(LENGTHS)):
        texts = plain_texts(case, engine, number % 5)
        wrong = np.random.default_rng(number).random(200) < 0.1 + 0.15 * (number % 5)
        guesser = Spoilt(texts, lambda place, wrong=wrong: bool(wrong[place]))
        requests = run(case, engine, prompts_of(case, number % 5), guesser, **SPOILT)
        assert [r.sequence.tokens for r in requests] == texts, f"round {number}"
        rejected += sum(r.output().drafts.proposed - r.output().drafts.kept for r in requests)
    assert rejected > 2000
