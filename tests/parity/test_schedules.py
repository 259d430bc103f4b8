"""Any schedule of steps gives each sequence the logits of its own full forward (a property test).

A schedule mixes everything that a scheduler may do: decode, prefill in chunks, verification of drafts of which any
number is kept, idle rows, padding, and new sequences in slots that were used before, several slots at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .configs import BY_NAME, Case
from .driver import Sequences, score
from .oracle import Array
from .references import SLOTS, WINDOW, reference, runner_of

TOLERANCE = 2e-5
TEXTS, LENGTH = 3, 110


@dataclass(frozen=True)
class Row:
    """What one slot does in a step: `new` true tokens (an idle row if 0), then `wrong` ones; `keep` of them are kept.

    `restart` ends the slot's sequence first and begins text number `restart` in it.
    """

    new: int
    wrong: int
    keep: int
    restart: int | None


@dataclass
class Progress:
    """A slot's target text and how far it is; `keep` of the pending tokens are kept."""

    number: int
    at: int = 0
    keep: int = 0


@st.composite
def rows(draw: st.DrawFn, prefill: bool) -> Row:
    if prefill:  # more tokens than the window: committed at once, so nothing may be wrong
        return Row(draw(st.integers(0, 30)), 0, 0, draw(st.one_of(st.none(), st.integers(0, TEXTS - 1))))
    new = draw(st.integers(0, WINDOW))
    wrong = draw(st.integers(0, WINDOW - new)) if new else 0
    restart = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, TEXTS - 1)))
    return Row(new, wrong, draw(st.integers(0, new)), restart)


@st.composite
def steps(draw: st.DrawFn) -> tuple[bool, dict[int, Row], int]:
    """Prefill or not, what each of some slots does (in an order of their own), and the number of padding rows."""
    prefill = draw(st.sampled_from([False, False, False, True]))
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=3, unique=True))
    return prefill, {slot: draw(rows(prefill)) for slot in slots}, draw(st.integers(0, 1))


@pytest.mark.parametrize(
    ("name", "engine"),
    [("official", "onnxruntime"), ("ngrams_apart", "onnxruntime"), ("ngrams_apart", "torch:reference")],
)
def test_any_schedule_equals_the_full_forward(name: str, engine: str) -> None:
    case = BY_NAME[name]
    runner = runner_of(case, engine)
    expected = [score(runner, reference(case, LENGTH, seed).tokens) for seed in range(TEXTS)]
    deviations = []

    @settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(steps(), min_size=25, max_size=40))
    def check(schedule: list[tuple[bool, dict[int, Row], int]]) -> None:
        run = Run(case, Sequences(runner))
        for prefill, planned, padding_rows in schedule:
            for number, at, logits in run.step(prefill, planned, padding_rows):
                part = expected[number][at : at + len(logits)]
                deviations.append(np.abs(logits - part).max() / expected[number].std())
                assert deviations[-1] < TOLERANCE

    check()
    assert len(deviations) > 100
    print(f"{name}, {engine}: {len(deviations)} rows, at most {max(deviations):.1e} of the deviation")


class Run:
    """One schedule under way."""

    def __init__(self, case: Case, sequences: Sequences) -> None:
        self.case, self.sequences = case, sequences
        self.progress: dict[int, Progress] = {}
        self.random = np.random.default_rng(0)

    def step(self, prefill: bool, planned: dict[int, Row], padding_rows: int) -> list[tuple[int, int, Array]]:
        """Take one step; returns (text, position, logits of the true tokens) of each row."""
        fed: dict[int, list[int]] = {}
        keep = {}
        for slot, row in planned.items():
            now = self._sequence(slot, row)
            true = reference(self.case, LENGTH, now.number).tokens[now.at : now.at + row.new]
            wrong = self.random.integers(0, self.case.text["vocab_size"], row.wrong).tolist()
            fed[slot] = true + wrong if true else []
            keep[slot] = now.keep
        width = max(WINDOW + 1, *(len(t) for t in fed.values())) if prefill else None
        logits = self.sequences.step(fed, keep, width=width, padding_rows=padding_rows)
        return [self._advance(slot, row, prefill, len(fed[slot]), logits[slot]) for slot, row in planned.items()
                if fed[slot]]  # fmt: skip

    def _sequence(self, slot: int, row: Row) -> Progress:
        if slot not in self.progress or row.restart is not None:
            self.sequences.start(slot)
            self.progress[slot] = Progress(row.restart or 0)
        return self.progress[slot]

    def _advance(self, slot: int, row: Row, prefill: bool, fed: int, logits: Array) -> tuple[int, int, Array]:
        now = self.progress[slot]
        start, true = now.at, fed - row.wrong
        now.keep = 0 if prefill else min(row.keep, true)
        now.at += true if prefill else now.keep
        return now.number, start, logits[:true]
