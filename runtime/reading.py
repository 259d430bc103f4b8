"""Read many pieces of files straight into arrays: several large reads at a time, in the order of the files.

    read_into_place([Piece(file, offset, source_dtype, target), …], progress=bar.update)

A checkpoint with a tensor per expert has tens of thousands of pieces, of 400 bytes (scales) to a few megabytes.
Pieces that follow each other in a file are read by one call that scatters into their targets; a large one is cut. Some
threads keep that many calls under way (the system call runs outside Python's lock), so the disk always has work. A
target of another dtype is filled through a buffer of one call's size: that is all the memory this takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.errors import CheckpointError
from flashnext.runtime.engines.base import Array

READ_BYTES = 8 << 20
"""Of one call: large enough that a disk's latency does not show, small enough to bound the buffers."""
THREADS = 8
"""Calls under way at once; solid-state disks reach their rate with a few large ones."""
MAX_BUFFERS = 512
"""Targets of one call; systems allow 1024 (IOV_MAX)."""


@dataclass(frozen=True)
class Piece:
    """Elements of `dtype` at `offset` of a file that belong into `target`, a contiguous flat array of any dtype."""

    file: Path
    offset: int
    dtype: np.dtype[Any]
    target: Array

    @property
    def nbytes(self) -> int:
        return int(self.target.size * self.dtype.itemsize)


def read_into_place(
    pieces: Iterable[Piece],
    progress: Callable[[int], object] = lambda count: None,
    threads: int = THREADS,
    keep_cached: bool = True,
) -> None:
    """Fill every piece's target; `progress` is told the bytes of each call when it is done.

    Without `keep_cached` the page cache forgets what has been read: it would only push out what is still needed.

    Raises:
        CheckpointError: a file that cannot be read, or that ends before its pieces do.
    """
    ordered = sorted(pieces, key=lambda p: (p.file, p.offset))
    calls = _calls(part for piece in ordered for part in _cut(piece))
    with ThreadPoolExecutor(threads, thread_name_prefix="read") as pool:
        # Only a few calls wait in line, so an error ends the work at once.
        under_way = {pool.submit(_read, call, keep_cached) for call in islice(calls, 2 * threads)}
        while under_way:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            _report(done, progress)
            under_way |= {pool.submit(_read, call, keep_cached) for call in islice(calls, len(done))}


def _report(done: Iterable[Future[int]], progress: Callable[[int], object]) -> None:
    for future in done:
        progress(future.result())


def _cut(piece: Piece) -> Iterator[Piece]:
    """The piece in parts that one call can read."""
    step = READ_BYTES // piece.dtype.itemsize
    for begin in range(0, piece.target.size, step):
        offset = piece.offset + begin * piece.dtype.itemsize
        yield Piece(piece.file, offset, piece.dtype, piece.target[begin : begin + step])


def _calls(parts: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Parts that one call can read together: adjacent in a file, within the limits."""
    call: list[Piece] = []
    end = size = 0
    for part in parts:
        follows = bool(call) and part.file == call[-1].file and part.offset == end
        if not follows or size + part.nbytes > READ_BYTES or len(call) == MAX_BUFFERS:
            if call:
                yield call
            call, size = [], 0
        call.append(part)
        end, size = part.offset + part.nbytes, size + part.nbytes
    if call:
        yield call


def _read(call: list[Piece], keep_cached: bool) -> int:
    """Read one run of a file into its targets; returns its bytes."""
    buffers = [p.target if p.target.dtype == p.dtype else np.empty(p.target.size, p.dtype) for p in call]
    try:
        _fill(call[0].file, call[0].offset, [b.view(np.uint8).data for b in buffers], keep_cached)
    except OSError as cause:
        raise CheckpointError(f"{call[0].file} cannot be read ({cause.strerror or cause}).") from None
    for piece, buffer in zip(call, buffers, strict=True):
        if buffer is not piece.target:
            np.copyto(piece.target, buffer, casting="unsafe")
    return sum(p.nbytes for p in call)


def _fill(file: Path, offset: int, views: list[memoryview], keep_cached: bool) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    start = offset
    try:
        while views:
            count = os.preadv(descriptor, views, offset)
            if count == 0:
                raise CheckpointError(f"{file} ends at byte {offset:,} before its tensors do. Download it again.")
            offset += count
            views = _rest(views, count)
        if not keep_cached:
            os.posix_fadvise(descriptor, start, offset - start, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is still to be filled after `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []
