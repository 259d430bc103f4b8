"""Reading pieces of files into place: any sizes, any order, cut and joined as the limits ask for."""

from __future__ import annotations

import ctypes
import mmap
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.errors import CheckpointError
from flashnext.runtime import reading
from flashnext.runtime.reading import Piece, read_into_place

BYTES = np.dtype(np.uint8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reading") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 16))
    return path


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60000), st.integers(0, 5000)), max_size=30),
    limit=st.sampled_from([16, 100, 4096]),
    buffers=st.integers(1, 5),
    threads=st.integers(1, 4),
)
def test_any_pieces(file: Path, spans: list[tuple[int, int]], limit: int, buffers: int, threads: int) -> None:
    content = np.frombuffer(file.read_bytes(), np.uint8)
    pieces = [Piece(file, begin, BYTES, np.zeros(size, np.uint8)) for begin, size in spans]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "READ_BYTES", limit)
        patch.setattr(reading, "MAX_BUFFERS", buffers)
        told: list[int] = []
        read_into_place(pieces, told.append, threads)
    assert sum(told) == sum(p.nbytes for p in pieces)
    for piece in pieces:
        np.testing.assert_array_equal(piece.target, content[piece.offset : piece.offset + piece.target.size])


def test_neighbours_are_read_by_one_call(file: Path) -> None:
    target = np.zeros(1000, np.uint8)
    told: list[int] = []
    read_into_place([Piece(file, 100 * i, BYTES, target[100 * i : 100 * i + 100]) for i in range(10)], told.append)
    assert told == [1000]
    assert target.tobytes() == file.read_bytes()[:1000]


def test_other_dtypes_are_converted(file: Path) -> None:
    small, target = np.dtype(np.int16), np.zeros(300, np.float32)
    read_into_place([Piece(file, 7, small, target)])
    np.testing.assert_array_equal(target, np.frombuffer(file.read_bytes(), small, 300, 7))


def test_short_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = reading.os.preadv
    monkeypatch.setattr(reading.os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
    targets = [np.zeros(n, np.uint8) for n in (5, 20, 0, 7)]
    read_into_place([Piece(file, at, BYTES, t) for at, t in zip((0, 5, 25, 25), targets, strict=True)])
    assert b"".join(t.tobytes() for t in targets) == file.read_bytes()[:32]


def test_file_that_has_become_shorter_or_is_gone(file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"file ends at byte 65,536 before its tensors do"):
        read_into_place([Piece(file, (1 << 16) - 10, BYTES, np.zeros(11, np.uint8))])
    with pytest.raises(CheckpointError, match=r"nowhere cannot be read \(No such file or directory\)"):
        read_into_place([Piece(file.with_name("nowhere"), 0, BYTES, np.zeros(1, np.uint8))])


def in_memory(path: Path) -> float:
    """Share of a file's pages that are in the page cache."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.size // mmap.PAGESIZE), np.uint8)
    size = ctypes.c_size_t(mapped.size)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(mapped.ctypes.data), size, ctypes.c_void_p(pages.ctypes.data)) == 0
    return float((pages & 1).mean())


def test_what_is_read_once_leaves_the_page_cache_where_that_is_asked(tmp_path: Path) -> None:
    path, size = tmp_path / "shard", 64 * mmap.PAGESIZE
    path.write_bytes(bytes(size))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(path):
        pytest.skip("this file system keeps its files in memory")
    pieces = [Piece(path, 0, BYTES, np.zeros(size, np.uint8))]
    read_into_place(pieces)
    assert in_memory(path) == 1
    read_into_place(pieces, keep_cached=False)
    assert in_memory(path) == 0


def test_memory_beyond_the_targets_is_bounded(tmp_path: Path) -> None:
    path, size = tmp_path / "holes", 256 << 20
    with path.open("wb") as stream:
        stream.truncate(size)
    target = np.empty(size // 4, np.float16)
    tracemalloc.start()
    read_into_place([Piece(path, 0, np.dtype(np.float32), target)], threads=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * reading.READ_BYTES
    assert not target.any()
