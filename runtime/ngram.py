"""N-gram rows: from the last few tokens to the hashed rows of the n-gram table, on the host.

The table (over 300 million rows in the official checkpoint) stays in the checkpoint's memory-mapped shards; a step
reads `heads` rows per token. The history comes from the tokens themselves, kept by the caller, never from a copy of
what a device saw: a drafted token that was rejected cannot be in it.

A `RowSource` takes one step's tokens and returns a ticket at once; the rows are fetched while the head graph runs
and collected before the body. `HostRows` is the plain implementation; `RowsAhead` keeps what was asked for before its
step began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.mapped_files.files import MappedFiles
from flashnext.runtime.ngram_core.library import NgramCore, threads_for
from flashnext.runtime.ngram_memory import TableMemory
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.row_metrics import RowCounts
from flashnext.runtime.row_worker import RowWorker

Ints = NDArray[np.int64]
ROWS_AT_ONCE = 1024
"""Fewer rows than this are read by the thread that asks for them: measured, the hand-off to another thread costs more
(up to milliseconds when cores are busy) than reading them (0.1 ms)."""


def ids(spec: NgramSpec, tokens: NDArray[Any], context: NDArray[Any]) -> Ints:
    """Row numbers [B, S, heads] of the table for tokens [B, S] that follow context [B, ngram_size - 1].

    Order m hashes the last m tokens: (t_i * a_0) xor (t_{i-1} * a_1) xor …, wrapping in int64, then the non-negative
    remainder by each head's size, plus the head's offset. Context before the start of the text is eos.
    """
    size, length = len(spec.multipliers), tokens.shape[1]
    history = np.concatenate([context, tokens], axis=1).astype(np.int64)
    multipliers = np.array(spec.multipliers, np.int64)
    sizes = np.array(spec.head_sizes, np.int64).reshape(size - 1, spec.heads_per_ngram)
    out = np.empty((*tokens.shape, *sizes.shape), np.int64)
    mixed = history[:, size - 1 :] * multipliers[0]
    across_eos = np.zeros(tokens.shape, np.bool_)
    for shift in range(1, size):
        earlier = history[:, size - 1 - shift : size - 1 - shift + length]
        # An eos between this position and the token hides everything up to it: those positions read as eos.
        across_eos |= earlier == spec.eos
        mixed ^= np.where(across_eos, spec.eos, earlier) * multipliers[shift]
        # numpy's remainder, like torch's, has the divisor's sign: never negative here.
        np.remainder(mixed[..., None], sizes[shift - 1], out=out[:, :, shift - 1])
    return out.reshape(*tokens.shape, -1) + np.array(spec.head_offsets, np.int64)


class Ticket(Protocol):
    """A fetch under way."""

    def wait(self) -> Any:
        """The rows [B, S, columns * heads] in the graph's dtype; zeros where a row of the batch has no token."""


class RowSource(Protocol):
    """Finds the rows of one n-gram layer."""

    on_device: bool
    """The device finds them when their step runs: nothing is fetched ahead, and tickets give arrays on the device."""

    def submit(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any], ahead: bool = False) -> Ticket:
        """Start fetching the rows of a step's valid tokens (`new_len` of each sequence); returns at once.

        `ahead`: the step has not begun, so there is time until the ticket is asked.
        """

    def counts(self) -> RowCounts:
        """What was gathered so far."""

    def close(self) -> None:
        """Let go of threads and files."""


class DeferredTicket:
    """Ticket of rows that are fetched when they are asked for.

    The head graph has been handed to the device by then, so on a GPU these microseconds pass while it runs; on a CPU it
    makes no difference when they are spent.
    """

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch

    def wait(self) -> Any:
        return self._fetch()


class HostRows:
    """Gathers rows straight from where the shards are; a mapped table is never copied.

    Long steps and what is asked for ahead are read on a thread of their own while a graph runs, short steps once
    their head has been started. Native code does it where it can be compiled (`flashnext.runtime.ngram_core`), numpy
    elsewhere.
    """

    on_device = False

    def __init__(
        self,
        spec: NgramSpec,
        table: NgramTable,
        dtype: str,
        native: bool = True,
        memory: TableMemory | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """`dtype` is what the graph takes; without `native`, numpy does the work. `memory` is closed with the rows.

        `cache_bytes` is memory for rows of a mapped table that were read before.

        Raises:
            RequestError: a cache without native code, or too small for one.
        """
        self.spec = spec
        self.table = table
        self._dtype = numpy_dtype(dtype)
        self._memory = memory
        self._core = NgramCore.open(table, cache_bytes) if native else None
        if cache_bytes and self._core is None:
            raise RequestError(
                "ngram_cache_bytes needs native code, which is switched off (FLASHNEXT_NATIVE=0), cannot be compiled "
                "here, or does not convert this table: allow it and install g++, or leave the option out."
            )
        self._worker = RowWorker(f"ngram-{spec.layer}")
        self._plain_counts = RowCounts()

    @classmethod
    def open(
        cls, spec: NgramSpec, checkpoint: Checkpoint, dtype: str, kept: str = "mapped", cache_bytes: int = 0
    ) -> HostRows:
        """The rows of the tensors that the manifest lists, kept as `flashnext.runtime.ngram_memory` says.

        Raises:
            CheckpointError: tensors that do not form the table, or a file that is cut short meanwhile.
            RequestError: the system refuses to keep them so, or there is no such cache (see `HostRows`).
        """
        memory = TableMemory(kept)
        try:
            with MappedFiles.of(checkpoint):
                table = NgramTable.open(spec, checkpoint, dtype, memory)
            return cls(spec, table, dtype, memory=memory, cache_bytes=cache_bytes)
        except BaseException:
            memory.close()
            raise

    def submit(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any], ahead: bool = False) -> Ticket:
        if not ahead and tokens.size * len(self.spec.head_sizes) < ROWS_AT_ONCE:
            return DeferredTicket(partial(self.rows, tokens, context, new_len))
        return self._worker.submit(partial(self.rows, tokens.copy(), context.copy(), new_len.copy()))

    def rows(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any]) -> Array:
        """The rows of one step, at once.

        Raises:
            CheckpointError: a file of the table has become shorter, or the table holds what is no scale.
        """
        with self.table.files:
            if self._core is not None:
                return self._core.rows(tokens, context, new_len, threads_for(tokens.size))
            return self._plain_rows(tokens, context, new_len)

    def _plain_rows(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any]) -> Array:
        heads, columns = len(self.spec.head_sizes), self.spec.columns
        valid = np.arange(tokens.shape[1]) < np.asarray(new_len)[:, None]
        out = np.zeros((*tokens.shape, heads, columns), self._dtype)
        wanted = ids(self.spec, tokens, context)[valid].reshape(-1)
        out[valid] = self.table.gather(wanted).reshape(-1, heads, columns)
        self._plain_counts += RowCounts(len(wanted), len(wanted) * self.table.row_bytes)
        return out.reshape(*tokens.shape, heads * columns)

    def counts(self) -> RowCounts:
        return self._plain_counts if self._core is None else self._core.counts()

    def close(self) -> None:
        self._worker.close()
        if self._memory is not None:
            self._memory.close()


@dataclass(frozen=True)
class Upcoming:
    """Tokens that a later step will run, by what their rows depend on: fields as in `StepBatch`."""

    token_ids: NDArray[Any]
    context: NDArray[Any]
    new_len: NDArray[Any]

    def same_as(self, other: Upcoming) -> bool:
        """Whether the rows are the same."""
        pairs = ((self.token_ids, other.token_ids), (self.context, other.context), (self.new_len, other.new_len))
        return all(np.array_equal(a, b) for a, b in pairs)


class RowsAhead:
    """Rows of the step that is to come, or of a later one; one at a time."""

    def __init__(self, sources: Mapping[str, RowSource]) -> None:
        self._sources = sources
        self._upcoming: Upcoming | None = None
        self._tickets: dict[str, Ticket] = {}

    def fetch(self, upcoming: Upcoming) -> None:
        """Start fetching, unless that is under way; what was fetched for another step is forgotten."""
        if any(source.on_device for source in self._sources.values()):
            return
        if self._upcoming is not None and self._upcoming.same_as(upcoming):
            return
        self._upcoming, self._tickets = upcoming, self._submit(upcoming, ahead=True)

    def take(self, step: Upcoming) -> tuple[dict[str, Ticket], bool]:
        """The tickets of a step that begins, and whether its rows had been asked for before."""
        if self._upcoming is not None and self._upcoming.same_as(step):
            tickets, self._upcoming, self._tickets = self._tickets, None, {}
            return tickets, True
        return self._submit(step), False

    def _submit(self, step: Upcoming, ahead: bool = False) -> dict[str, Ticket]:
        return {n: s.submit(step.token_ids, step.context, step.new_len, ahead) for n, s in self._sources.items()}
