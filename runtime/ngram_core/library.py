"""Builds and loads `rows.cpp`, and calls it on numpy arrays.

    core = NgramCore.open(table)      # None where it cannot serve: no compiler, or formats that only numpy converts
    rows = core.rows(tokens, context, new_len)
    core.counts()                     # what all calls did

The library is compiled by g++ once (`flashnext.runtime.native`).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export import number_formats
from flashnext.export.errors import CheckpointError, RequestError
from flashnext.runtime import native
from flashnext.runtime.engines.base import Array
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.row_metrics import RowCounts

SOURCE = Path(__file__).parent / "rows.cpp"
FORMS = {"plain": 0, "fp8": 1, "nvfp4": 2, "widened": 3}
"""of table.h; "widened" is a plain BF16 table whose rows are wanted as float32"""
OUTPUTS = {"float32": 0, "bfloat16": 1}
STORAGES = {"resident": 0, "mapped": 1, "mapped, untold": 2}
MAX_HEADS = 64
LOOKUP_BITS = 12
"""The table of shards by row number has at most this many bits of entries, so that it stays in a cache."""
TOKENS_PER_THREAD = 256
MAX_WORKSPACES = 8
FREE_REFERENCES = 3
"""What `sys.getrefcount` says of an array that is held by its list's entry, the loop's name and the call alone."""
WAYS, MAX_CACHED_BYTES = 8, 4096
"""of row_cache.h"""
LINE = 64
"""Outputs begin at a line of the caches, so that whole lines can be written around them."""

Ints = NDArray[np.int64]
_HASHING = ("multipliers", "head_sizes", "head_reciprocals", "head_offsets")
_ARRAYS = (*_HASHING, "shards", "row_scales", "starts", "shard_of")
_POINTERS = (*_ARRAYS, "e4m3", "values")


class _Counters(ctypes.Structure):
    """NgramCounters of table.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "bytes", "missing", "hot", "watch"))


class _Cache(ctypes.Structure):
    """RowCache of table.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tags", "uses", "locks", "rows")),
        ("sets", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class _Table(ctypes.Structure):
    """NgramTable of table.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("eos", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        *((n, ctypes.c_int32) for n in ("size", "heads", "shard_count", "shard_shift", "form", "output", "storage")),
        ("counters", ctypes.c_void_p),
        ("cache", _Cache),
        ("scale", ctypes.c_float),
    )


class NgramCore:
    """The rows of one table. Calls release Python's lock, and any number of threads may call."""

    def __init__(self, library: ctypes.CDLL, table: NgramTable, cache_bytes: int = 0) -> None:
        self._spec, self._dtype = table.spec, table.dtype
        self._library, self._call = library, library.flashnext_ngram_rows
        self._counters = _Counters()
        self._arrays, self._table = _describe(table, self._counters)
        self._cache, self._table.cache = _cache_of(table, cache_bytes)
        self._pointer = ctypes.addressof(self._table)
        self._before = len(table.spec.multipliers) - 1
        self._heads = len(table.spec.head_sizes)
        self._shards = table.shards  # keeps the mapped files open
        self._workspaces = _Workspaces(self._before, self._heads * table.spec.columns, table.dtype)

    @classmethod
    def open(cls, table: NgramTable, cache_bytes: int = 0) -> NgramCore | None:
        """The core for a table, or None where numpy has to do; `cache_bytes` is memory for rows of a mapped one."""
        library = load()
        return cls(library, table, cache_bytes) if library is not None and _serves(table) else None

    def rows(self, tokens: NDArray[Any], context: NDArray[Any], new_len: NDArray[Any], threads: int = 1) -> Array:
        """Rows [B, S, heads * columns] of tokens [B, S] that follow context [B, size - 1]; zeros beyond `new_len` [B].

        Raises:
            CheckpointError: an NVFP4 scale that is none.
        """
        batch, width = tokens.shape
        place = self._workspaces.take(batch, width)
        place.context[...] = context
        place.tokens[...] = tokens
        place.lengths[...] = new_len
        out, address = place.output()
        result = self._call(self._pointer, *place.addresses, batch, width, threads, address)
        self._workspaces.give_back(place)
        if result:
            name = self._spec.row_scales[-1 - result]
            raise CheckpointError(f"{name} holds NaN or a negative scale. Download the checkpoint again.")
        return out

    def counts(self) -> RowCounts:
        """What all calls together did."""
        return RowCounts(self._counters.rows, self._counters.bytes, self._counters.missing, self._counters.hot)

    def ids(self, tokens: NDArray[Any], context: NDArray[Any]) -> Ints:
        """Row numbers [B, S, heads], as `flashnext.runtime.ngram.ids`."""
        history = np.concatenate([context, tokens], axis=1, dtype=np.int64)
        out = np.empty((*tokens.shape, self._heads), np.int64)
        self._library.flashnext_ngram_ids(self._pointer, history.ctypes.data, *tokens.shape, out.ctypes.data)
        return out


class _Workspace:
    """Arrays of one shape of step, whose addresses are known, so that a step neither allocates nor asks for them."""

    def __init__(self, batch: int, width: int, before: int, columns: int, dtype: np.dtype[Any]) -> None:
        history = np.empty((batch, before + width), np.int64)
        self.context, self.tokens = history[:, :before], history[:, before:]
        self.lengths = np.empty(batch, np.int32)
        self.addresses = (history.ctypes.data, self.lengths.ctypes.data)
        self.shape = (batch, width)
        self._columns, self._dtype = columns, dtype
        self._outputs: list[tuple[Array, int]] = []

    def output(self) -> tuple[Array, int]:
        """An output that nobody else holds, and its address: one of earlier steps, or a new one."""
        for out, address in self._outputs:
            if sys.getrefcount(out) == FREE_REFERENCES:
                return out, address
        out = _aligned((*self.shape, self._columns), self._dtype)
        self._outputs = [*self._outputs[-1:], (out, out.ctypes.data)]
        return self._outputs[-1]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    memory = np.empty(math.prod(shape) * dtype.itemsize + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : memory.size - LINE + start].view(dtype).reshape(shape)


class _Workspaces:
    """Workspaces by shape; a call takes one out while it runs, so that calls do not meet."""

    def __init__(self, *facts: Any) -> None:
        self._facts = facts
        self._free: OrderedDict[tuple[int, int], _Workspace] = OrderedDict()

    def take(self, batch: int, width: int) -> _Workspace:
        return self._free.pop((batch, width), None) or _Workspace(batch, width, *self._facts)

    def give_back(self, place: _Workspace) -> None:
        self._free[place.shape] = place
        if len(self._free) > MAX_WORKSPACES:
            with suppress(KeyError):  # others have taken the rest
                self._free.popitem(last=False)  # in one go: other threads give and take meanwhile


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library, or None (`flashnext.runtime.native`)."""
    library = native.load("ngram-rows", SOURCE)
    return None if library is None else declared(library)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with its functions' types."""
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.flashnext_ngram_rows.restype = count
    library.flashnext_ngram_rows.argtypes = (pointer, pointer, pointer, count, count, ctypes.c_int32, pointer)
    library.flashnext_ngram_ids.restype = None
    library.flashnext_ngram_ids.argtypes = (pointer, pointer, count, count, pointer)
    return library


def _serves(table: NgramTable) -> bool:
    """Whether rows.cpp has this conversion."""
    spec, dtype = table.spec, table.dtype.name
    plain = _form(table) != "plain" or all(s.dtype == table.dtype for s in table.shards)
    groups = spec.form != "nvfp4" or spec.columns % number_formats.GROUP == 0
    together = all(s.flags.c_contiguous for s in (*table.shards, *table.row_scales))
    return dtype in OUTPUTS and plain and groups and together and len(spec.head_sizes) <= MAX_HEADS


def _form(table: NgramTable) -> str:
    stored = {s.dtype.name for s in table.shards}
    widened = table.spec.form == "plain" and stored == {"bfloat16"} and table.dtype.name == "float32"
    return "widened" if widened else table.spec.form


def _describe(table: NgramTable, counters: _Counters) -> tuple[dict[str, Array], _Table]:
    """The struct, and the arrays that it points to."""
    spec = table.spec
    starts = np.cumsum([0, *(len(s) for s in table.shards)], dtype=np.int64)
    shift = max(int(starts[-1]).bit_length() - LOOKUP_BITS, 0)
    buckets = np.arange(0, int(starts[-1]), 1 << shift)
    arrays: dict[str, Array] = {
        "multipliers": np.array(spec.multipliers, np.int64),
        "head_sizes": np.array(spec.head_sizes, np.int64),
        "head_reciprocals": np.iinfo(np.int64).max // np.array(spec.head_sizes, np.int64),
        "head_offsets": np.array(spec.head_offsets, np.int64),
        "shards": _addresses(table.shards),
        "row_scales": _addresses(table.row_scales),
        "starts": starts,
        "shard_of": (np.searchsorted(starts, buckets, side="right") - 1).astype(np.int32),
        "e4m3": number_formats.E4M3,
        "values": table.values,
    }
    pointers = {name: array.ctypes.data if array.size else None for name, array in arrays.items()}
    sizes = {"size": len(spec.multipliers), "heads": len(spec.head_sizes), "shard_count": len(table.shards)}
    formats = {"form": FORMS[_form(table)], "output": OUTPUTS[table.dtype.name], "scale": float(table.scale)}
    rest = {"eos": spec.eos, "columns": spec.columns, "storage": STORAGES[table.storage]}
    counted = ctypes.addressof(counters)
    return arrays, _Table(**pointers, **sizes, **formats, **rest, shard_shift=shift, counters=counted)


def _cache_of(table: NgramTable, limit: int) -> tuple[list[Array], _Cache]:
    """Memory for rows that were read before, taken as it fills, and the struct that points to it.

    Raises:
        RequestError: too little for one set of rows, or rows that are too long.
    """
    if not limit:
        return [], _Cache()
    way = 8 + 1 + table.row_bytes  # tag, uses, row
    sets = limit // (WAYS * way + 1)
    if sets < 1 or table.row_bytes > MAX_CACHED_BYTES:
        raise RequestError(
            f"ngram_cache_bytes = {limit:,} for a table: its rows of {table.row_bytes:,} bytes need at least "
            f"{WAYS * way + 1:,}, and are kept up to {MAX_CACHED_BYTES:,} bytes each. Give more, or leave it out."
        )
    sets = 1 << (sets.bit_length() - 1)
    arrays: list[Array] = [
        np.zeros(sets * WAYS, np.int64),
        np.zeros(sets * WAYS, np.uint8),
        np.zeros(sets, np.uint8),
        np.zeros(sets * WAYS * table.row_bytes, np.uint8),
    ]
    return arrays, _Cache(*(a.ctypes.data for a in arrays), sets, table.row_bytes)


def _addresses(arrays: Sequence[Array]) -> NDArray[np.uint64]:
    return np.array([a.ctypes.data for a in arrays], np.uint64)


def threads_for(tokens: int) -> int:
    """Threads that pay for a step of so many tokens."""
    wanted = tokens // TOKENS_PER_THREAD
    return min(len(os.sched_getaffinity(0)), wanted) if wanted > 1 else 1
