"""N-gram rows that the device finds itself, for `ngram_gather = "device"`: see `RowSource`.

The table stays in pinned host memory, which the device addresses as its own (UVA: unified virtual addressing). A step's
tokens, context and lengths go to the device, some bytes a token; the kernel plugins/ngram_rows hashes them and gathers
over PCIe into the buffer that the body graph reads. All of it runs on the side stream while the head graph runs, and
the body waits for it by an event. The host makes no rows and waits for none.

Nothing is fetched ahead: a chunk's rows (2.6 MB for 512 tokens of the official model in BF16) come over PCIe while the
chunk's own head runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.export.number_formats import GROUP
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.engines.tensorrt.arrays import Buffer, DeviceArray
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.engines.tensorrt.staging import Staging
from flashnext.runtime.ngram import DeferredTicket, Ticket
from flashnext.runtime.ngram_memory import TableMemory
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.row_metrics import RowCounts

INT32 = np.dtype(np.int32)
E4M3: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Most:
    """Of a step: sequences, and tokens of all of them together."""

    sequences: int
    tokens: int


class RowKernel:
    """The kernel for one n-gram layer: where its inputs and its rows are on the device.

    Args:
        dtype: of the rows, as the body takes them.
        consumed: event of the body's last run, which still reads the rows.
    """

    def __init__(self, session: Session, spec: NgramSpec, dtype: str, most: Most, consumed: int) -> None:
        self._session, self._dtype, self._most = session, numpy_dtype(dtype), most
        self._columns, self._width = spec.columns, len(spec.head_sizes) * spec.columns
        self.rows = Buffer(session.device.allocate(most.tokens * self._width * self._dtype.itemsize))
        before = len(spec.multipliers) - 1
        # Tokens last: what is copied in a step ends with them, and most steps have few.
        counts = {"new_len": most.sequences, "context": most.sequences * before, "token_ids": most.tokens}
        sizes = {name: count * INT32.itemsize for name, count in counts.items()}
        self._inputs = Staging(session, sizes, consumed, on_side=True)
        lists = {name: getattr(spec, name) for name in ("multipliers", "head_sizes", "head_offsets")}
        self._constants: dict[str, Any] = {name: session.upload(pairs(numbers)) for name, numbers in lists.items()}
        self._constants |= {"eos": spec.eos, "columns": spec.columns}
        self._launches: dict[tuple[int, int], Callable[[], None]] = {}

    def set_table(self, dtype: np.dtype[Any], rows: int, address: int, scales: int = 0, scale: float = 1.0) -> None:
        """The table, as stored, and its scales (those of its rows at `scales`: NVFP4), where the device finds them."""
        packed = dtype == np.uint8
        stored = self._columns // 2 if packed else self._columns
        self._constants["table"] = self._array(address, (rows, stored), dtype)
        if packed:
            self._constants["row_scales"] = self._array(scales, (rows, self._columns // GROUP), E4M3)
        self._constants["scale"] = scale
        self._launches = {}

    def try_table(self, dtype: np.dtype[Any]) -> None:
        """Run a step without tokens, of which no row is read, on a table of this dtype that is not there.

        Raises:
            EngineError: the kernel does not take such a table.
        """
        nowhere = self.rows.memory.address
        self.set_table(dtype, 1, nowhere, nowhere)
        before = len(self._constants["multipliers"]) - 1
        self.gather(np.zeros((1, 1), np.int32), np.zeros((1, before), np.int64), np.zeros(1, np.int32))
        self._session.device.synchronize(self._session.side)

    def gather(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any]) -> DeviceArray:
        """Queue a step: the rows [B, S, heads * columns], good until the next one; the main stream waits for them.

        Raises:
            EngineError: more tokens than a step may have, or a table that there is no kernel for.
        """
        batch, steps = tokens.shape
        if batch > self._most.sequences or batch * steps > self._most.tokens:
            raise EngineError(
                f"A step of {batch} sequences, {steps} tokens each, has more n-gram rows than the engine was built for "
                f"({self._most.sequences} sequences, {self._most.tokens} tokens together). Run fewer or shorter ones."
            )
        if (batch, steps) not in self._launches:
            self._launches[batch, steps] = self._prepare(batch, steps, context.shape[1])
        self.rows.generation += 1
        given = {"new_len": new_len, "context": context, "token_ids": tokens}
        ids = {name: np.asarray(values, np.int32) for name, values in given.items()}
        self._inputs.put(ids, then=self._launches[batch, steps])
        return self._out(batch, steps, self.rows)

    def release(self) -> None:
        """Give pinned memory back, once nothing is under way."""
        self._inputs.release()

    def _prepare(self, batch: int, steps: int, before: int) -> Callable[[], None]:
        session, shapes = self._session, {"token_ids": (batch, steps), "context": (batch, before), "new_len": (batch,)}
        inputs = {name: self._array(self._inputs.address(name), shape, INT32) for name, shape in shapes.items()}
        values = {**self._constants, **inputs, "out": self._out(batch, steps)}
        assert session.kernels is not None
        return session.kernels.prepare("ngram_rows", values, session.side)

    def _out(self, batch: int, steps: int, buffer: Buffer | None = None) -> DeviceArray:
        return self._array(self.rows.memory.address, (batch, steps, self._width), self._dtype, buffer)

    def _array(
        self, address: int, shape: Sequence[int], dtype: np.dtype[Any], buffer: Buffer | None = None
    ) -> DeviceArray:
        return DeviceArray(self._session.device, self._session.stream, address, shape, dtype, buffer)


class DeviceRows:
    """The rows of one n-gram layer, found by the device in a pinned table."""

    on_device = True

    def __init__(self, session: Session, kernel: RowKernel, table: NgramTable, memory: TableMemory) -> None:
        """`table` is what the kernel was told of; `memory`, in which it lies, is closed with the rows."""
        self._session, self._kernel, self._memory = session, kernel, memory
        self._table = table  # its arrays own the memory
        self._rows = 0

    @classmethod
    def open(
        cls, session: Session, spec: NgramSpec, checkpoint: Checkpoint, dtype: str, most: Most, consumed: int
    ) -> DeviceRows:
        """Pin the table that the manifest lists, once it is known that there is a kernel for it.

        `dtype`, `most`, `consumed`: see `RowKernel`.

        Raises:
            EngineError: no kernel for this table.
            RequestError: the system cannot pin it.
            CheckpointError: it cannot be read, or is none.
        """
        kernel = RowKernel(session, spec, dtype, most, consumed)
        memory = TableMemory("pinned", session.device)
        try:
            stored = {checkpoint.tensors[name].dtype for name in spec.shards}
            check_kernel(kernel, spec, stored, dtype)
            table = NgramTable.open(spec, checkpoint, dtype, memory)
            table.check_row_scales()
            codes, scales = (memory.device_address(x[0]) if x else 0 for x in (table.shards, table.row_scales))
            rows = sum(map(len, table.shards))  # in one piece, whatever the shards
            kernel.set_table(NUMPY_DTYPES[min(stored)], rows, codes, scales, float(table.scale))
            return cls(session, kernel, table, memory)
        except BaseException:
            session.drain()
            kernel.release()
            memory.close()
            raise

    def submit(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any], ahead: bool = False) -> Ticket:
        """See `RowSource`. The work is queued when the ticket is asked: by then the head runs, and the host's
        microseconds cost nothing."""
        return DeferredTicket(partial(self._gather, tokens, context, new_len))

    def _gather(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any]) -> DeviceArray:
        found = self._kernel.gather(tokens, context, new_len)
        self._rows += int(new_len.sum()) * len(self._table.spec.head_sizes)
        return found

    def counts(self) -> RowCounts:
        """Rows and their bytes; all of them are in memory, and there is no cache of some."""
        return RowCounts(self._rows, self._rows * self._table.row_bytes)

    def close(self) -> None:
        self._session.drain()  # the device may still read the table
        self._kernel.release()
        self._memory.close()


def check_kernel(kernel: RowKernel, spec: NgramSpec, stored: Collection[str], dtype: str) -> None:
    """Raise an EngineError unless the kernel takes such a table: tried on a step without tokens, which reads no row.

    Args:
        stored: dtypes of the table's shards, as safetensors names them.
    """
    try:
        if len(stored) != 1:
            raise EngineError("The kernel takes shards of one dtype.")
        kernel.try_table(NUMPY_DTYPES[min(stored)])
    except EngineError as cause:
        found = (
            f"{', '.join(sorted(stored))}; {len(spec.head_sizes)} heads of {spec.columns} columns, wanted in {dtype}"
        )
        raise EngineError(
            f'ngram_gather = "device" cannot take the n-gram table of layer {spec.layer} ({found}). '
            f'{str(cause).rstrip(".")}. Let the host gather (ngram_gather = "host").'
        ) from None


def pairs(numbers: Sequence[int]) -> Array:
    """64-bit numbers as two of 32 bits, the low one first: [n, 2]."""
    found: Array = np.array(numbers, "<i8").view("<i4").reshape(-1, 2)
    return found
