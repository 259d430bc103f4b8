"""Which sequences run next, and in which slots. No engine is called here.

Slots are taken in the order of arrival and given back the moment a sequence ends. Prompts are run in chunks, one
sequence at a time and oldest first; the last chunk is as short as what is left, so the shapes that a prompt runs in
do not depend on its neighbours, and neither does its text. Sequences with a single token to run form the decode
batch. When there is both, chunks and decode steps take turns: a long prompt delays the others by one chunk, never by
its whole length. Drafts ride with the decode batch; a step is as wide as its longest row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashnext.export.errors import RequestError
from flashnext.runtime.sequence import Chunk, Row, Sequence, Step


class Scheduler:
    """Owner of the slots.

    Args:
        slots: how many the bundle's states have.
        window: tokens that a step may leave pending (the bundle's W).
        prefill_chunk: most tokens of a prompt in one step.
        max_batch: most sequences at once (all slots when None).
        max_waiting: most sequences that may wait for a slot (any number when None).
        on_admit: told of each sequence that has got a slot, before its first step.
    """

    def __init__(
        self,
        slots: int,
        window: int,
        prefill_chunk: int = 512,
        max_batch: int | None = None,
        max_waiting: int | None = None,
        on_admit: Callable[[Sequence], object] = lambda sequence: None,
    ) -> None:
        if prefill_chunk < 1:
            raise RequestError(f"prefill_chunk = {prefill_chunk}; a chunk needs at least 1 token.")
        if max_batch is not None and not 1 <= max_batch <= slots:
            raise RequestError(
                f"max_batch = {max_batch} is not from 1 to the bundle's {slots} slots; "
                "export it with more slots (--slots) or lower it."
            )
        self._window = window
        self._chunk = prefill_chunk
        self._max_waiting = max_waiting
        self._on_admit = on_admit
        self._free = list(range(max_batch or slots))[::-1]
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._decoded_last = False

    def limit(self, sequences: int, tokens: int) -> None:
        """Plan no step of more sequences, or of more tokens of a prompt; before the first sequence is added."""
        self._free = self._free[-sequences:]
        self._chunk = min(self._chunk, tokens)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it gets a slot in its turn.

        Raises:
            RequestError: as many wait already as may.
        """
        beyond_slots = len(self._waiting) - len(self._free)
        if self._max_waiting is not None and beyond_slots >= self._max_waiting:
            raise RequestError(
                f"{beyond_slots} requests wait already and max_waiting is {self._max_waiting}. Try again when "
                "some have ended, or open the LLM with a larger max_waiting."
            )
        self._waiting.append(sequence)

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to run."""
        self._admit()
        decoding = [s for s in self._running if s.waiting_tokens == 1]
        prefilling = next((s for s in self._running if s.waiting_tokens > 1), None)
        self._decoded_last = bool(decoding) and not (prefilling and self._decoded_last)
        if self._decoded_last:
            rows = tuple(Row(s, 1, tuple(s.drafts)) for s in decoding)
            coming = self._chunk_at(prefilling, 0) if prefilling else None
            return Step(rows, max(row.columns for row in rows), coming)
        if prefilling is None:
            return None
        length = min(prefilling.waiting_tokens, self._chunk)
        return Step((Row(prefilling, length),), length, self._chunk_at(prefilling, length))

    def _chunk_at(self, sequence: Sequence, ahead: int) -> Chunk | None:
        """The chunk that begins so many tokens ahead, if the prompt goes on there."""
        length = min(sequence.waiting_tokens - ahead, self._chunk)
        return Chunk(sequence, sequence.past + ahead, length) if length > 0 else None

    def ran(self, step: Step) -> None:
        """Record that a planned step ran."""
        for row in step.rows:
            row.sequence.ran(row.length, step.width, self._window)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, running or waiting, for whatever reason; its slot is free at once. Twice does no harm."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            self._free.append(sequence.slot)
            sequence.slot = None

    @contextmanager
    def borrow_slot(self) -> Iterator[int]:
        """A slot for use outside the plan (scoring), given back at the end.

        Raises:
            RequestError: unfinished sequences hold all of them.
        """
        if not self._free:
            raise RequestError("All slots are in use by streams that have not ended; finish or close one of them.")
        slot = self._free.pop()
        try:
            yield slot
        finally:
            self._free.append(slot)

    def _admit(self) -> None:
        while self._waiting and self._free:
            sequence = self._waiting.popleft()
            sequence.slot = self._free.pop()
            self._running.append(sequence)
            self._on_admit(sequence)
