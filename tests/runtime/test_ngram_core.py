"""Native n-gram rows equal numpy's bit by bit, ids equal transformers', and faults come back as errors."""

from __future__ import annotations

import dataclasses
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.ngram import HostRows, ids
from flashnext.runtime.ngram_core import library
from flashnext.runtime.ngram_core.library import NgramCore
from flashnext.runtime.ngram_table import NgramTable

E4M3 = ml_dtypes.float8_e4m3fn
EOS = 7
PRIMES = (101, 103, 107, 109, 113, 127)
pytestmark = pytest.mark.skipif(library.load() is None, reason="there is no C++ compiler here")


def table_of(form: str, dtype: str, shards: int = 3, columns: int = 32, stored: str = "", scale: float = 0.37) -> Any:
    """A random table of all codes but NaN scales; with `stored`, a plain one of that dtype."""
    sizes, rows = PRIMES[:4], 424
    names = tuple(f"s{i}" for i in range(shards))
    spec = NgramSpec(
        layer=1,
        input="x",
        multipliers=(-3344, 55555555555557, 999999999999999),
        head_sizes=sizes,
        head_offsets=tuple(np.cumsum((0, *sizes[:-1])).tolist()),
        heads_per_ngram=2,
        eos=EOS,
        columns=columns,
        rows=rows,
        shards=names,
        form=form,
        scale="scale" if form != "plain" else "",
        row_scales=names if form == "nvfp4" else (),
    )
    rng = np.random.default_rng(5)
    cuts = np.sort(rng.choice(np.arange(1, rows), shards - 1, replace=False))
    if form == "plain":
        whole = rng.normal(size=(rows, columns)).astype(np.dtype(getattr(ml_dtypes, stored, stored)))
        return NgramTable(spec, np.split(whole, cuts), dtype)
    codes = rng.integers(0, 256, (rows, columns if form == "fp8" else columns // 2)).astype(np.uint8)
    if form == "fp8":
        return NgramTable(spec, np.split(codes.view(E4M3), cuts), dtype, scale=scale)
    scales = rng.integers(0, 0x7F, (rows, columns // 16)).astype(np.uint8).view(E4M3)
    return NgramTable(spec, np.split(codes, cuts), dtype, np.split(scales, cuts), scale)


def both(table: NgramTable, dtype: str) -> tuple[HostRows, HostRows]:
    native, plain = (HostRows(table.spec, table, dtype, native=n) for n in (True, False))
    assert NgramCore.open(table) is not None
    return native, plain


FORMS = [
    ("plain", "bfloat16", "bfloat16"),
    ("plain", "float32", "float32"),
    ("plain", "float32", "bfloat16"),
    ("fp8", "bfloat16", ""),
    ("fp8", "float32", ""),
    ("nvfp4", "bfloat16", ""),
    ("nvfp4", "float32", ""),
]


@pytest.mark.parametrize(("form", "dtype", "stored"), FORMS)
@pytest.mark.parametrize("shards", [1, 7])
def test_rows_equal_numpys_bit_by_bit(form: str, dtype: str, stored: str, shards: int) -> None:
    native, plain = both(table_of(form, dtype, shards, stored=stored), dtype)
    rng = np.random.default_rng(1)
    for batch, width in [(1, 1), (3, 1), (2, 5), (1, 700), (2, 300)]:
        tokens = rng.integers(0, 20, (batch, width)).astype(np.int32)
        context, lengths = rng.integers(0, 20, (batch, 2)), rng.integers(0, width + 1, batch)
        found, expected = (rows.rows(tokens, context, lengths) for rows in (native, plain))
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scale", [2.0**-133, 1e-30, 1.0, 3e5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_code_and_extreme_scales(scale: float, dtype: str) -> None:
    native, plain = both(table_of("fp8", dtype, columns=176, scale=scale), dtype)
    tokens = np.arange(600, dtype=np.int32)[None] % 40
    args = (tokens, np.full((1, 2), EOS), np.array([600]))
    assert native.rows(*args).tobytes() == plain.rows(*args).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 5, 1000])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    table = table_of("plain", "float32", stored="float32")
    core = NgramCore.open(table)
    assert core is not None
    tokens = np.random.default_rng(2).integers(0, 90, (2, 333)).astype(np.int32)
    args = (tokens, np.full((2, 2), EOS), np.array([333, 100]))
    assert core.rows(*args, threads).tobytes() == core.rows(*args).tobytes()


@pytest.mark.parametrize(("form", "dtype", "stored"), FORMS[:2] + FORMS[3:])
@pytest.mark.parametrize("limit", [1 << 11, 1 << 14, 1 << 20])
def test_rows_by_way_of_the_cache_are_the_same(form: str, dtype: str, stored: str, limit: int) -> None:
    """Caches of a few rows, of a part of them, of all; several threads at once fill and read them."""
    table = table_of(form, dtype, stored=stored)
    table.storage = "mapped"
    core, plain = NgramCore.open(table, limit), HostRows(table.spec, table, dtype, native=False)
    assert core is not None
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 20, (2, 400)).astype(np.int32)
    args = (tokens, rng.integers(0, 20, (2, 2)), np.array([400, 250]))
    expected = plain.rows(*args).tobytes()
    for threads in (1, 4, 1):
        assert core.rows(*args, threads).tobytes() == expected
    with ThreadPoolExecutor(4) as pool:
        assert {r.tobytes() for r in pool.map(lambda _: core.rows(*args, 2), range(12))} == {expected}
    counts = core.counts()
    assert counts.rows == 15 * 650 * 4
    assert 0 < counts.hot < counts.rows
    if limit == 1 << 20:  # all of its 424 rows, each read once
        assert counts.rows - counts.hot <= 2 * 424


@pytest.mark.parametrize("form", ["plain", "fp8", "nvfp4"])
def test_the_cache_of_a_table_whose_first_shard_is_empty(form: str) -> None:
    table = table_of(form, "float32", shards=1, stored="float32")
    parts = [table.shards[0][:0], table.shards[0]]
    scales = [s.view(E4M3) for part in table.row_scales for s in (part[:0], part)]
    spec = dataclasses.replace(table.spec, shards=("s0", "s1"), row_scales=("s0", "s1") if scales else ())
    parts = [part.view(E4M3) for part in parts] if form == "fp8" else parts
    halves = NgramTable(spec, parts, "float32", scales, float(table.scale), "mapped")
    assert halves.row_bytes == table.row_bytes
    core, plain = NgramCore.open(halves, 1 << 20), HostRows(spec, halves, "float32", native=False)
    assert core is not None
    tokens = np.random.default_rng(6).integers(0, 20, (1, 200)).astype(np.int32)
    args = (tokens, np.full((1, 2), EOS), np.array([200]))
    expected = plain.rows(*args).tobytes()
    assert [core.rows(*args).tobytes() for _ in range(2)] == [expected] * 2


def test_threads_give_and_take_workspaces_of_many_shapes() -> None:
    places = library._Workspaces(2, 4, np.dtype(np.float32))

    def run(seed: int) -> None:
        for width in np.random.default_rng(seed).integers(1, 30, 5000).tolist():
            place = places.take(1, width)
            assert place.shape == (1, width)
            places.give_back(place)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(4)))
    finally:
        sys.setswitchinterval(before)


def test_pages_that_are_not_in_memory_are_fetched_and_counted(tmp_path: Path) -> None:
    table = table_of("plain", "float32", shards=1, columns=1024, stored="float32")  # a page is a row
    whole = table.shards[0].copy()
    (tmp_path / "table").write_bytes(whole.tobytes())
    with (tmp_path / "table").open("r+b") as file:
        os.fsync(file.fileno())
        mapped = np.memmap(tmp_path / "table", np.float32, "r", shape=whole.shape)
        mapping: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]
        mapping.madvise(mmap.MADV_RANDOM)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    core = NgramCore.open(NgramTable(table.spec, [mapped], "float32", storage="mapped"))
    assert core is not None
    tokens = np.random.default_rng(4).integers(0, 90, (1, 300)).astype(np.int32)
    args = (tokens, np.full((1, 2), EOS), np.array([300]))
    expected = HostRows(table.spec, table, "float32", native=False).rows(*args)
    assert core.rows(*args).tobytes() == expected.tobytes()
    first = core.counts()
    if not first.missing:
        pytest.skip("this file system keeps its files in memory")
    distinct = len(np.unique(ids(table.spec, *args[:2])))
    assert 0.5 * distinct <= first.missing <= first.rows
    for _ in range(20):
        core.rows(*args)
    assert core.counts().missing == first.missing


def test_what_only_numpy_converts_is_left_to_it() -> None:
    assert NgramCore.open(table_of("plain", "float32", stored="float16")) is None
    assert NgramCore.open(table_of("fp8", "float16")) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 60), st.integers(0, 2**32), st.integers(2, 30))
def test_ids_equal_numpys(batch: int, width: int, seed: int, vocabulary: int) -> None:
    table = table_of("plain", "float32", stored="float32")
    core = NgramCore.open(table)
    assert core is not None
    rng = np.random.default_rng(seed)
    tokens, context = rng.integers(0, vocabulary, (batch, width)), rng.integers(0, vocabulary, (batch, 2))
    np.testing.assert_array_equal(core.ids(tokens, context), ids(table.spec, tokens, context))


def test_remainders_of_extreme_hashes_and_sizes() -> None:
    """The division by reciprocals is exact: for all of int64, by sizes from 1 on (pages are never touched)."""
    sizes = (1, 2, 3, 2**16, 2**27 + 29, 2**28 - 57)
    codes = np.zeros((sum(sizes), 1), np.uint8).view(E4M3)
    spec = NgramSpec(
        layer=1,
        input="x",
        multipliers=(1, 0),
        head_sizes=sizes,
        head_offsets=tuple(np.cumsum((0, *sizes[:-1])).tolist()),
        heads_per_ngram=len(sizes),
        eos=EOS,
        columns=1,
        rows=len(codes),
        shards=("s0",),
        form="fp8",
        scale="scale",
    )
    core = NgramCore.open(NgramTable(spec, [codes], "float32"))
    assert core is not None
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    near = np.array([k * s + d for s in sizes for k in (-9, -1, 0, 1, 9, high // s // 2) for d in (-1, 0, 1)])
    random = np.random.default_rng(3).integers(low, high, 100_000, endpoint=True)
    hashes = np.concatenate([[low, low + 1, -1, 0, 1, high - 1, high], near, random])[None]
    context = np.zeros((1, 1), np.int64)
    np.testing.assert_array_equal(core.ids(hashes, context), ids(spec, hashes, context))


def test_a_bad_nvfp4_scale_is_named_with_its_shard() -> None:
    table = table_of("nvfp4", "float32")
    table.row_scales[1][:] = 0x7F
    rows = HostRows(table.spec, table, "float32")
    with pytest.raises(CheckpointError, match="s1 holds NaN or a negative scale"):
        rows.rows(np.arange(300)[None], np.full((1, 2), EOS), np.array([300]))


FORK = """
import numpy as np, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from test_ngram_core import NgramCore, table_of
core = NgramCore.open(table_of("plain", "float32", stored="float32"))
step = (np.arange(1500)[None], np.full((1, 2), 7), np.array([1500]))
for _ in range(3):
    expected = core.rows(*step, 2).tobytes()
    time.sleep(0.05)  # its helper waits again
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(30)
processors = os.sched_getaffinity(0)
for _ in range(10):
    assert core.rows(*step, 4).tobytes() == expected
    time.sleep(0.01)
assert os.sched_getaffinity(0) == processors
"""


def test_a_forked_child_has_helpers_of_its_own() -> None:
    """It neither waits for its parent's, nor takes itself for one of them and leaves its processor."""
    subprocess.run([sys.executable, "-c", FORK, Path(__file__).parent], check=True)


TRUNCATE = """
import numpy as np, os, sys
from pathlib import Path
from flashnext.export.errors import CheckpointError
sys.path.insert(0, sys.argv[2])
from test_ngram_core import table_of
from flashnext.runtime.mapped_files.files import MappedFiles
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.ngram_table import NgramTable
table = table_of("plain", "float32", shards=1, columns=4096, stored="float32")
table.shards[0].tofile(sys.argv[1])
mapped = np.memmap(sys.argv[1], np.float32, "r", shape=table.shards[0].shape)
files = MappedFiles.open({Path(sys.argv[1]): mapped.nbytes})
rows = HostRows(table.spec, NgramTable(table.spec, [mapped], "float32", files=files), "float32")
step = (np.arange(600)[None], np.full((1, 2), 7), np.array([600]))
rows.rows(*step)
os.truncate(sys.argv[1], 4096)
for _ in range(3):
    try:
        rows.submit(*step).wait()
    except CheckpointError as error:
        print(error)
print("alive")
"""


def test_a_file_that_shrinks_while_in_use_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRUNCATE, tmp_path / "table", Path(__file__).parent]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    *errors, last = run.stdout.splitlines()
    assert len(errors) == 3
    assert all("table has become shorter while it was in use: 4,096 of 6,946,816 bytes" in e for e in errors)
    assert last == "alive"


def test_without_a_compiler_numpy_does_it() -> None:
    code = "from flashnext.runtime.ngram_core import library; print(library.load())"
    for change in ({"FLASHNEXT_NATIVE": "0"}, {"CXX": "no-such-compiler"}, {"CXX": "/bin/false"}):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=change)
        assert run.stdout == "None\n"
