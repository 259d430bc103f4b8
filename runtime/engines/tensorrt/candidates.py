"""The largest logits of each row, picked on the device behind a run of a graph, so that a step brings back kilobytes.

The kernel (plugins/candidates) is launched with every run of a graph that makes logits, inside its captured graph, and
one copy brings its results to the host. The rows themselves stay where they are until somebody asks for one whole,
which is counted, or for the sum at another temperature than 1, which runs the kernel once more.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.tensorrt.arrays import Buffer, DeviceArray
from flashnext.runtime.engines.tensorrt.kernels import Kernels, Launch
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.logits import Floats

MOST = 256
"""Logits of a row that are brought back: 2 KB of 1 MB, and more than the top-k that people ask for."""
FORMATS = ("float32", "bfloat16")
"""Of logits that the kernel takes."""
LEAST_INVERSE = float(np.finfo(np.float32).smallest_subnormal)
"""What 1 / temperature is at least, for the kernel: 0 would be none. No logits tell it from smaller ones."""
F32, INT32, BYTES = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint8)
PART_BYTES = 16
"""What the parts of the results are aligned to, as kernels want it."""


class CandidateSelection:
    """Picks the largest logits of a graph's rows, and hands them to the host.

    Args:
        logits: where the graph leaves its logits; its generation counts the runs.
        vocabulary, dtype: of a row.
        rows: most rows of a step.
    """

    def __init__(
        self, session: Session, kernels: Kernels, logits: Buffer, vocabulary: int, dtype: np.dtype[Any], rows: int
    ) -> None:
        self._session, self._kernels, self._logits = session, kernels, logits
        self._vocabulary, self._dtype, self.rows = vocabulary, dtype, rows
        self._count = min(MOST, vocabulary)
        self._results = session.buffer(_Layout(rows, self._count).nbytes)
        self._layouts: dict[int, _Layout] = {}
        self._launches: dict[int, Launch] = {}
        self.whole_rows = 0
        """Rows that were copied to the host whole."""
        self.launch(rows)  # the workspace gets its final size

    def launch(self, rows: int) -> Launch:
        """What is queued behind a run with so many rows."""
        if rows not in self._launches:
            self._layouts[rows] = _Layout(rows, self._count)
            self._launches[rows] = self._prepare(self._rows(rows), temperature=1.0)
        return self._launches[rows]

    def collect(self, rows: int) -> DeviceLogits:
        """Queue the copy of the results; they can be read once the stream has been waited for."""
        layout = self._layouts[rows]
        packed = self._session.result(self._results.memory.address, layout.shape, BYTES)
        return DeviceLogits(_Step(self, self._rows(rows, self._logits), layout, packed), 0, rows)

    def sums(self, logits: DeviceArray, temperature: float) -> Floats:
        """The sums [N] of the last run at another temperature."""
        layout = self._layouts[len(logits)]
        self._prepare(logits, temperature)()
        sums = self._session.result(self._results.memory.address + layout.sums, [len(logits)], F32)
        self._session.device.synchronize(self._session.stream)
        return sums

    def whole(self, rows: DeviceArray) -> Floats:
        """Rows of the last run."""
        self.whole_rows += len(rows)
        found = self._session.result(rows.address, rows.shape, rows.dtype)
        self._session.device.synchronize(self._session.stream)
        return found.astype(np.float32, copy=False)

    def _prepare(self, logits: DeviceArray, temperature: float) -> Launch:
        rows, results = len(logits), self._results.memory.address
        layout = self._layouts[rows]
        device, stream = self._session.device, self._session.stream
        values = {
            "logits": logits,
            "values": DeviceArray(device, stream, results, (rows, self._count), F32),
            "indices": DeviceArray(device, stream, results + layout.indices, (rows, self._count), INT32),
            "sums": DeviceArray(device, stream, results + layout.sums, (rows,), F32),
            "inverse_temperature": max(1.0 / temperature, LEAST_INVERSE),
        }
        return self._kernels.prepare("candidates", values, stream)

    def _rows(self, rows: int, buffer: Buffer | None = None) -> DeviceArray:
        device, stream, address = self._session.device, self._session.stream, self._logits.memory.address
        return DeviceArray(device, stream, address, (rows, self._vocabulary), self._dtype, buffer)


class _Layout:
    """Where values [rows, count], indices [rows, count] and sums [rows] are among the results, in bytes."""

    def __init__(self, rows: int, count: int) -> None:
        self.rows, self.count = rows, count
        self.indices = -(-4 * rows * count // PART_BYTES) * PART_BYTES
        self.sums = 2 * self.indices
        self.nbytes = self.sums + 4 * rows
        self.shape = (self.nbytes,)

    def values_of(self, packed: Array) -> Floats:
        return packed[: 4 * self.rows * self.count].view(F32).reshape(self.rows, self.count)

    def indices_of(self, packed: Array) -> NDArray[np.int32]:
        return packed[self.indices :][: 4 * self.rows * self.count].view(INT32).reshape(self.rows, self.count)

    def sums_of(self, packed: Array) -> Floats:
        return packed[self.sums :].view(F32)


class _Step:
    """What one run of the graph left: `logits` [N, V] on the device, the rest on the host."""

    def __init__(self, selection: CandidateSelection, logits: DeviceArray, layout: _Layout, packed: Array) -> None:
        self.selection, self.logits = selection, logits
        self._layout, self._packed = layout, packed

    @cached_property
    def values(self) -> Floats:
        return self._layout.values_of(self._packed)

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        return self._layout.indices_of(self._packed)

    @cached_property
    def _sums(self) -> dict[float, Floats]:
        return {1.0: self._layout.sums_of(self._packed)}

    def sum(self, row: int, temperature: float) -> float:
        if temperature not in self._sums:
            self._sums[temperature] = self.selection.sums(self.logits, temperature)
        return float(self._sums[temperature][row])


class DeviceLogits:
    """See `flashnext.runtime.logits.LogitRows`: the rows from `begin` to `end` of a step."""

    def __init__(self, step: _Step, begin: int, end: int) -> None:
        self._step, self._begin, self._end = step, begin, end

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._end - self._begin, self._step.logits.shape[1])

    def __len__(self) -> int:
        return self._end - self._begin

    @overload
    def __getitem__(self, at: int) -> DeviceLogitRow: ...
    @overload
    def __getitem__(self, at: slice) -> DeviceLogits: ...
    def __getitem__(self, at: int | slice) -> DeviceLogitRow | DeviceLogits:
        """A row, or some that lie together.

        Raises:
            IndexError: there is no such row, or rows are left out in between.
        """
        rows = range(self._begin, self._end)[at]
        if isinstance(rows, range):
            if rows.step != 1:
                raise IndexError("Logits on a device are cut in steps of 1.")
            return DeviceLogits(self._step, rows.start, rows.stop)
        return DeviceLogitRow(self._step, rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        rows = self._step.selection.whole(self._step.logits[self._begin : self._end])
        return rows if dtype is None else rows.astype(dtype)


class DeviceLogitRow:
    """See `flashnext.runtime.logits.LogitRow`."""

    def __init__(self, step: _Step, row: int) -> None:
        self._step, self._row = step, row

    @property
    def tokens(self) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = self._step.tokens[self._row]
        return tokens

    @property
    def logits(self) -> Floats:
        logits: Floats = self._step.values[self._row]
        return logits

    def sum(self, temperature: float) -> float:
        return self._step.sum(self._row, temperature)

    def whole(self) -> Floats:
        row: Floats = self._step.selection.whole(self._step.logits[self._row : self._row + 1])[0]
        return row

    def __len__(self) -> int:
        return self._step.logits.shape[1]
