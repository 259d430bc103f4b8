"""Where the n-gram table is kept: in the mapped files (the default), or in memory for good.

| kept | what it is | for |
| --- | --- | --- |
| mapped | the checkpoint's files; the page cache holds what was read | tables of any size |
| locked | the same, read at the start and never evicted (mlock) | machines whose memory holds the table |
| huge | a copy in anonymous memory with huge pages: fewer misses of the TLB | the same, for speed |
| pinned | such a copy that a GPU may read (cudaHostRegister) | GPUs that gather the rows themselves (ngram_gather) |

What takes memory for good is compared with what is available before the first byte is read.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.export.progress import byte_bar
from flashnext.runtime.available_memory import available_memory
from flashnext.runtime.engines.base import Array
from flashnext.runtime.reading import Piece, read_into_place

KINDS = ("mapped", "locked", "huge", "pinned")
GATHERERS = ("host", "device")
"""Who hashes tokens and gathers their rows; the device from a pinned table only."""
HUGE_PAGE = 2 << 20
ROOM = 0.95
"""Of the available memory that a table may take: the rest is the runtime's own."""


def table_bytes(ngrams: Iterable[NgramSpec], checkpoint: Checkpoint) -> int:
    """Bytes of the tables of these layers, as stored."""
    names = [name for spec in ngrams for name in (*spec.shards, *spec.row_scales)]
    return sum(checkpoint.tensors[name].length for name in names if name in checkpoint.tensors)


def cache_has_room(checkpoint: Checkpoint, read: int, taken: int) -> bool:
    """Whether the page cache can keep `read` bytes of other tensors beside the n-gram tables, while `taken` are taken.

    Where it cannot, what is read once should be forgotten at once: else it pushes out the table, of which every token
    reads some rows.
    """
    tables = table_bytes((checkpoint.ngram_spec(i) for i in checkpoint.config.ngram_layers), checkpoint)
    return tables + read + taken <= available_memory()


def check_room(kind: str, needed: int, cache_bytes: int = 0) -> None:
    """Refuse a table of so many bytes, or a cache of its rows, that does not fit; or a kind that does not exist.

    Raises:
        RequestError: no such kind, or more bytes than are available.
    """
    if kind not in KINDS:
        raise RequestError(f"ngram_table = {kind!r:.80} is not one of {', '.join(KINDS)}.")
    room = int(ROOM * available_memory())
    if kind != "mapped" and needed > room:
        raise RequestError(
            f'ngram_table = "{kind}" needs {needed / 1e9:.1f} GB of memory for good, and {room / 1e9:.1f} GB are to be '
            'had. Keep the table in its files (ngram_table = "mapped"), or free memory.'
        )
    if cache_bytes and kind != "mapped":
        raise RequestError(
            f'ngram_cache_bytes is for a table in its files; with ngram_table = "{kind}" all of it is in memory. Leave '
            "one of the two out."
        )
    if cache_bytes > room:
        raise RequestError(
            f"ngram_cache_bytes = {cache_bytes:,}: the cache of rows takes more than the {room / 1e9:.1f} GB that are "
            "to be had. Give it less."
        )


def check_gather(gather: str, kind: str) -> None:
    """Raise a RequestError if rows are to be gathered by a device that cannot read the table."""
    if gather == "device" and kind != "pinned":
        raise RequestError(
            f'ngram_gather = "device" reads a pinned table, and ngram_table = "{kind}" is none: set ngram_table = '
            '"pinned" (--ngram-table pinned) too.'
        )


class Pins(Protocol):
    """Who pins memory: a GPU (`flashnext.runtime.engines.tensorrt.device.Device`)."""

    def pin(self, address: int, nbytes: int) -> int:
        """Where the GPU finds what lies at this address of the host."""

    def unpin(self, address: int) -> None:
        """Take that back."""


@dataclass(frozen=True)
class _Held:
    """What was locked or pinned; where a GPU finds it."""

    address: int
    nbytes: int
    device_address: int = 0


@dataclass
class TableMemory:
    """Keeps tensors of tables; `close` gives back what was locked, pinned or taken.

    Raises:
        EngineError: "pinned" without a GPU.
    """

    kind: str = "mapped"
    pins: Pins | None = None
    """Who pins; the first GPU when None."""
    storage: str = field(init=False)
    """As `NgramTable` wants it; known after `place`."""
    _held: list[_Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.storage = "mapped" if self.kind == "mapped" else "resident"
        if self.kind == "pinned" and self.pins is None:
            self.pins = _gpu()

    @property
    def in_files(self) -> bool:
        """Whether the table is mapped, and not copied."""
        return self.kind in ("mapped", "locked")

    def place(self, checkpoint: Checkpoint, names: Sequence[str]) -> list[Array]:
        """The named tensors, kept as this kind is.

        Raises:
            RequestError: the system refuses to lock or pin them.
            CheckpointError: a file cannot be read.
        """
        if not self.in_files:
            return self._copied(checkpoint, names)
        arrays = [checkpoint.array(name) for name in names]
        for name, array in zip(names, arrays, strict=True):
            if self.kind == "locked":
                self._lock(array)
                continue
            _advise_random(array)
            if not _tells_pages(checkpoint.tensors[name].file):
                self.storage = "mapped, untold"
        return arrays

    def close(self) -> None:
        """Unlock and unregister; the arrays must not be used by a GPU afterwards."""
        for held in self._held:
            if self.pins is not None:
                with suppress(EngineError):  # of a GPU that has failed
                    self.pins.unpin(held.address)
            else:
                _libc().munlock(ctypes.c_void_p(held.address), ctypes.c_size_t(held.nbytes))
        self._held = []

    def device_address(self, array: Array) -> int:
        """Where a GPU finds an array of a pinned table."""
        address = array.ctypes.data
        held = next(h for h in self._held if h.address <= address < h.address + h.nbytes)
        return held.device_address + address - held.address

    def _copied(self, checkpoint: Checkpoint, names: Sequence[str]) -> list[Array]:
        """The tensors in one piece, so that a kernel takes a table of several shards as one."""
        infos = [checkpoint.tensors[name] for name in names]
        ends = np.cumsum([info.length for info in infos])
        whole = _huge_array((int(ends[-1]) if names else 0,), np.dtype(np.uint8))
        arrays = [
            whole[end - info.length : end].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
            for info, end in zip(infos, ends, strict=True)
        ]
        pieces = [
            Piece(info.file, info.offset, array.dtype, array.reshape(-1))
            for info, array in zip(infos, arrays, strict=True)
        ]
        with byte_bar(sum(p.nbytes for p in pieces), "reading the n-gram table") as bar:
            read_into_place(pieces, bar.update, keep_cached=False)
        if self.pins is not None and whole.size:
            self._held.append(self._pin(self.pins, whole))
        return arrays

    def _pin(self, pins: Pins, array: Array) -> _Held:
        try:
            found = pins.pin(array.ctypes.data, array.nbytes)
        except EngineError as cause:
            raise RequestError(f'{cause} Take ngram_table = "huge" instead, whose rows the host gathers.') from None
        return _Held(array.ctypes.data, array.nbytes, found)

    def _lock(self, array: Array) -> None:
        address, size = array.ctypes.data, array.nbytes
        if _libc().mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
            reason = os.strerror(ctypes.get_errno())
            raise RequestError(
                f"The system refuses to lock {size:,} bytes of the n-gram table in memory ({reason}). Raise the limit "
                '(ulimit -l unlimited), or keep the table as it is (ngram_table = "mapped").'
            )
        self._held.append(_Held(address, size))


def _huge_array(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """New memory in huge pages, as far as the system has them."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size + HUGE_PAGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, np.uint8, 1).ctypes.data % HUGE_PAGE
    return np.frombuffer(memory, np.uint8, size, start).view(dtype).reshape(shape)


def _advise_random(array: Array) -> None:
    """Faults read their own page only: around it lie rows that nobody asked for."""
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_RANDOM)


def _tells_pages(file: os.PathLike[str]) -> bool:
    """Whether mincore tells this user which pages of a file are in memory (Linux: those who might write to it)."""
    return os.stat(file).st_uid == os.geteuid() or os.access(file, os.W_OK)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _gpu() -> Pins:
    """The first GPU.

    Raises:
        EngineError: there is none.
    """
    from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice

    return CudaDevice(asked_by='ngram_table = "pinned"', instead='take ngram_table = "huge"')
