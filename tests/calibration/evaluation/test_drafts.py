"""Acceptance lengths: bounds, and one draft by its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashnext.calibration.evaluation.drafts import acceptance_lengths
from flashnext.runtime import LLM, SamplingParams


def test_acceptance_of_one_draft_is_what_the_scores_say(random_bundle: Path) -> None:
    prompt = list(range(5, 25))
    lengths = acceptance_lengths(random_bundle, [prompt], new_tokens=24, most=3)
    assert all(1.0 <= length <= drafts + 1 for drafts, length in enumerate(lengths, start=1))
    with LLM(random_bundle, threads=1) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
        text = prompt + output.token_ids
        guesses = llm.score_draft([text])[0].argmax(-1)
    known, rounds = len(prompt) + 1, 0
    while known + 1 < len(text):
        known += 2 if int(guesses[known - 2]) == text[known] else 1
        rounds += 1
    assert np.isclose(lengths[0], (known - len(prompt) - 1) / rounds)
