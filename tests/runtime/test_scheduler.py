"""Scheduler invariants over random arrivals, lengths, ends and shapes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.errors import RequestError
from flashnext.runtime.scheduler import Scheduler
from flashnext.runtime.sequence import Sequence, Step, context


class Slots:
    """What the states of a bundle remember, slot by slot: the contract of a step's lengths, checked at every step."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.committed: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}

    def run(self, step: Step) -> None:
        batch = step.batch(ngram_context=2, eos=-1)
        assert len(set(batch.slots.tolist())) == len(step.rows)
        assert batch.token_ids.shape == (len(step.rows), step.width)
        for i, slot in enumerate(batch.slots.tolist()):
            past, length = int(batch.past_len[i]), int(batch.new_len[i])
            if past == 0:
                self.committed[slot], self.pending[slot] = [], []
            kept = self.pending[slot][: int(batch.accepted[i])]
            assert len(kept) == batch.accepted[i]
            self.committed[slot] += kept
            assert len(self.committed[slot]) == past
            tail = [-1, -1, *self.committed[slot]][-2:]
            assert batch.context[i].tolist() == tail
            new = batch.token_ids[i, :length].tolist()
            assert 1 <= length <= step.width
            assert batch.logit_rows[i] == i * step.width + length - 1
            if step.width > self.window:
                self.committed[slot] += new
                self.pending[slot] = []
            else:
                self.pending[slot] = new

    def holds(self, slot: int) -> list[int]:
        return self.committed[slot] + self.pending[slot]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_every_sequence_finishes_with_its_tokens_in_its_slot(
    arrivals: list[tuple[int, int, int]], slots: int, window: int, chunk: int
) -> None:
    """Prompt length, output length and time of arrival of each request are drawn."""
    scheduler, memory = Scheduler(slots, window, chunk), Slots(window)
    wanted = {Sequence(list(range(100 * i, 100 * i + n))): (out, at) for i, (n, out, at) in enumerate(arrivals)}
    clock = 0
    while not all(s.finished for s in wanted):
        for sequence, (_, at) in wanted.items():
            if at == clock:
                scheduler.add(sequence)
        clock += 1
        step = scheduler.plan()
        if step is None:
            assert not scheduler.busy
            continue
        assert step.width <= max(chunk, 1)
        memory.run(step)
        scheduler.ran(step)
        for row in step.rows:
            sequence = row.sequence
            assert sequence.slot is not None
            assert memory.holds(sequence.slot) == sequence.tokens[: sequence.past]
            if sequence.waiting_tokens == 0:
                sequence.tokens.append(len(sequence.tokens))
                if sequence.output_length == wanted[sequence][0]:
                    scheduler.finish(sequence)
        taken = Counter(s.slot for s in wanted if s.slot is not None)
        assert not taken or max(taken.values()) == 1
        assert scheduler.free_slots + len(taken) == slots
        assert clock < 10_000
    assert scheduler.free_slots == slots
    assert not scheduler.busy


def add(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    sequences = [Sequence([1] * n) for n in lengths]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def run_step(scheduler: Scheduler) -> tuple[int, int]:
    """Run one step, say a token where one is due; returns (rows, width)."""
    step = scheduler.plan()
    assert step is not None
    scheduler.ran(step)
    for row in step.rows:
        if row.sequence.waiting_tokens == 0:
            row.sequence.tokens.append(1)
    return len(step.rows), step.width


def test_a_long_prompt_takes_turns_with_the_others() -> None:
    scheduler = Scheduler(slots=3, window=2, prefill_chunk=4)
    add(scheduler, 2)
    assert run_step(scheduler) == (1, 2)
    add(scheduler, 13)
    steps = [run_step(scheduler) for _ in range(7)]
    assert steps == [(1, 1), (1, 4), (1, 1), (1, 4), (1, 1), (1, 4), (2, 1)]


def test_a_prompt_that_arrives_after_a_decode_step_is_next() -> None:
    scheduler = Scheduler(slots=2, window=2, prefill_chunk=4)
    add(scheduler, 1)
    assert run_step(scheduler) == (1, 1)
    add(scheduler, 5)
    assert [run_step(scheduler) for _ in range(3)] == [(1, 4), (2, 1), (2, 1)]


def test_chunks_wider_than_the_window_commit_and_short_remainders_stay_pending() -> None:
    scheduler = Scheduler(slots=1, window=3, prefill_chunk=4)
    (sequence,) = add(scheduler, 10)
    seen = []
    for _ in range(4):
        run_step(scheduler)
        seen.append((sequence.past, sequence.pending))
    assert seen == [(4, 0), (8, 0), (10, 2), (11, 1)]


def test_a_slot_is_reused_at_once_and_the_oldest_waits_least() -> None:
    scheduler = Scheduler(slots=1, window=8)
    first, second, third = add(scheduler, 2, 2, 2)
    run_step(scheduler)
    slot = first.slot
    scheduler.finish(first)
    run_step(scheduler)
    assert (first.slot, second.slot, third.slot) == (None, slot, None)


def test_finishing_a_waiting_sequence_or_twice_leaks_nothing() -> None:
    scheduler = Scheduler(slots=1, window=8)
    first, second = add(scheduler, 2, 2)
    run_step(scheduler)
    for sequence in (second, first, first):
        scheduler.finish(sequence)
    assert not scheduler.busy
    assert scheduler.free_slots == 1


def test_a_borrowed_slot_comes_back_and_none_is_lent_when_all_are_taken() -> None:
    scheduler = Scheduler(slots=2, window=8, max_batch=1)
    with scheduler.borrow_slot(), pytest.raises(RequestError, match="All slots are in use"), scheduler.borrow_slot():
        pass
    assert scheduler.free_slots == 1


def test_options_out_of_range() -> None:
    with pytest.raises(RequestError, match="prefill_chunk = 0"):
        Scheduler(slots=1, window=8, prefill_chunk=0)
    with pytest.raises(RequestError, match="max_batch = 3 is not from 1 to the bundle's 2 slots"):
        Scheduler(slots=2, window=8, max_batch=3)


def test_context_before_the_start_is_eos() -> None:
    assert [context([5, 6, 7], past, 2, eos=9) for past in range(4)] == [[9, 9], [9, 5], [5, 6], [6, 7]]
