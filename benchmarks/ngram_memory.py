"""An n-gram table that is larger than memory: right, within bounds, and how fast, cold and warm.

    python benchmarks/ngram_memory.py                                  # a table of 6 GB under a limit of 0.5 GB
    python benchmarks/ngram_memory.py --gigabytes 20 --limit 2 --table /mnt/disk/table
    python benchmarks/ngram_memory.py --table table --only text      # some of the measurements; the table is kept

A file of BF16 rows is written and mapped as a checkpoint's shard is. The measurements run in a memory
control group of that limit, which the page cache counts in; making one needs write access to /sys/fs/cgroup (root, as
a rule). Every row that is gathered is compared with what was written. Prompts and steps are random tokens, which hardly
meet a row twice; *text* is the first 100,000 tokens (of models/small) of this repository's Markdown and Python. *Faults
alone* reads as a mapped file does by itself, page by page. *Warm* is a part of the table that lies in memory, without
a limit; *in huge pages* a copy of it (`--ngram-table huge`). The last table is about weights that are read once, after
an earlier process has left a table in the page cache. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from ngram_rows import COLUMNS, random_codes, spec_of, texts

from flashnext.runtime.cli.parser import number_from
from flashnext.runtime.cli.table import render
from flashnext.runtime.ngram import HostRows, ids
from flashnext.runtime.ngram_memory import _advise_random, _huge_array
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.reading import Piece, read_into_place
from flashnext.runtime.tokenizer import Tokenizer

ROW_BYTES = 2 * COLUMNS
BLOCK_ROWS = 4096
"""Row r of the table holds what row r % BLOCK_ROWS of a random block holds."""
CHUNK, TEXT_TOKENS = 512, 100_000
WARM_BYTES = 2_000_000_000
REPOSITORY = Path(__file__).resolve().parents[1]
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


# --- the table and the limit ---------------------------------------------------------------------------


def write_table(path: Path, rows: int) -> None:
    """The file, on the disk and not in the page cache."""
    block = random_codes(BLOCK_ROWS, ROW_BYTES)
    many = np.concatenate([block] * 16)
    with path.open("wb") as file:
        for start in range(0, rows, len(many)):
            file.write(many[: rows - start].data)
        file.flush()
        os.fsync(file.fileno())
    forget(path)


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """A control group with a limit; None where none can be made."""
    for parent, file in zip(GROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = parent / f"flashnext-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit))
        except OSError:
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    yield None


def most_used(group: Path) -> int:
    """The most memory that a group had, page cache and all."""
    file = next(f for f in (group / "memory.max_usage_in_bytes", group / "memory.peak") if f.exists())
    return int(file.read_text())


# --- one measurement, in a process of its own ------------------------------------------------------------


class Rows:
    """The mapped table, with or without reading ahead and a cache of rows; compares all that it gathers."""

    def __init__(self, path: Path, rows: int, cache_bytes: int, ahead: bool, huge: bool) -> None:
        if huge:
            mapped = _huge_array((rows, ROW_BYTES), np.dtype(np.uint8))
            read_into_place([Piece(path, 0, mapped.dtype, mapped.reshape(-1))], keep_cached=False)
        else:
            mapped = np.memmap(path, np.uint8, "r", shape=(rows, ROW_BYTES))
            _advise_random(mapped)
        spec = spec_of(rows, "plain")
        # "resident" is what the native code takes for memory: it gathers, and faults do the reading.
        storage = "mapped" if ahead and not huge else "resident"
        shards = np.array_split(mapped.view(ml_dtypes.bfloat16), len(spec.shards))
        table = NgramTable(spec, shards, "bfloat16", storage=storage)
        self._rows = HostRows(spec, table, "bfloat16", cache_bytes=cache_bytes)
        self._block = random_codes(BLOCK_ROWS, ROW_BYTES)

    def seconds(self, step: tuple[Any, Any, Any]) -> float:
        start = time.perf_counter()
        found = self._rows.rows(*step)
        seconds = time.perf_counter() - start
        wanted = self._block[ids(self._rows.spec, *step[:2]).reshape(-1) % BLOCK_ROWS]
        if found.tobytes() != wanted.tobytes():
            raise AssertionError("rows differ from what was written")
        return seconds

    def facts(self, times: list[float], first: int = 0) -> dict[str, Any]:
        counts = self._rows.counts()
        return {
            "steps": len(times),
            "p50_ms": float(np.median(times[first:])) * 1e3,
            "p99_ms": float(np.quantile(times[first:], 0.99)) * 1e3,
            "seconds": sum(times),
            "rows": counts.rows,
            "hot": counts.hot / counts.rows,
            "missing": counts.missing / counts.rows,
            "own_mb": own_memory() / 1e6,
        }


def text_chunks() -> list[tuple[Any, Any, Any]]:
    """Chunks of the repository's own text."""
    tokenizer = Tokenizer.open(REPOSITORY / "models/small")
    assert tokenizer is not None
    command = ["git", "ls-files", "*.md", "*.py"]
    names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    tokens = [t for name in sorted(names) for t in tokenizer.encode((REPOSITORY / name).read_text())]
    steps = []
    for start in range(2, min(len(tokens), TEXT_TOKENS) - CHUNK, CHUNK):
        chunk, before = tokens[start : start + CHUNK], tokens[start - 2 : start]
        steps.append((np.array([chunk], np.int32), np.array([before], np.int64), np.array([CHUNK], np.int32)))
    return steps


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """What one child measures."""
    path, rows = Path(task["path"]), task["rows"]
    if task["kind"] == "guard":
        return guard(path, rows * ROW_BYTES, task["keep"])
    if task["warm"] and not task["huge"]:
        read_through(path, rows * ROW_BYTES)
    source = Rows(path, rows, task["cache"], task["ahead"], task["huge"])
    steps = text_chunks() if task["kind"] == "text" else texts(task["width"], task["steps"])
    times = [source.seconds(step) for step in steps]
    return source.facts(times, len(times) // 5 if task["warm"] else 0)


def read_through(path: Path, size: int) -> None:
    """Bring the first bytes of a file into the page cache."""
    with path.open("rb") as file:
        while size > 0 and (got := file.read(min(size, 16 << 20))):
            size -= len(got)


def guard(path: Path, size: int, keep: bool) -> dict[str, Any]:
    """How much of the first `size` bytes stays in the page cache while the rest of the file is read into place once."""
    read_through(path, size)
    mapped = np.memmap(path, np.uint8, "r", shape=(size,))
    before, start = resident(mapped), time.perf_counter()
    target, end = np.empty(64 << 20, np.uint8), path.stat().st_size
    for offset in range(size, end - target.size, target.size):
        read_into_place([Piece(path, offset, target.dtype, target)], keep_cached=keep)
    seconds = time.perf_counter() - start
    return {"before": before, "after": resident(mapped), "gigabytes_a_second": (end - size) / seconds / 1e9}


def resident(mapped: Any) -> float:
    """Share of the pages of a mapping that are in memory."""
    pages = (ctypes.c_ubyte * -(-mapped.size // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size)
    if ctypes.CDLL(None, use_errno=True).mincore(address, size, pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return float((np.frombuffer(pages, np.uint8) & 1).mean())


def child(task: dict[str, Any], group: Path | None) -> dict[str, Any]:
    """Run a task in a new process, in the group if there is one."""
    command = [sys.executable, __file__, "--task", json.dumps({**task, "group": str(group or "")})]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    facts: dict[str, Any] = json.loads(run.stdout)
    return facts


# --- the report ----------------------------------------------------------------------------------------


def tasks(cache: int) -> dict[str, dict[str, Any]]:
    """By what the table calls them."""
    prompt, decode = {"kind": "random", "width": 4096, "steps": 8}, {"kind": "random", "width": 1, "steps": 300}
    text = {"kind": "text"}
    limited = {"warm": False, "cache": 0, "ahead": True, "huge": False, "limited": True}
    warm = {**limited, "warm": True, "limited": False}
    prompts, steps = {**prompt, "steps": 40}, {**decode, "steps": 4000}
    return {
        "prompt of 4,096, cold, faults alone": {**limited, **prompt, "ahead": False},
        "prompt of 4,096, cold": {**limited, **prompt},
        "decode step, cold, faults alone": {**limited, **decode, "ahead": False},
        "decode step, cold": {**limited, **decode},
        "text in chunks of 512, cold, faults alone": {**limited, **text, "ahead": False},
        "text in chunks of 512, cold, no cache of rows": {**limited, **text},
        "text in chunks of 512, cold, with a cache of rows": {**limited, **text, "cache": cache},
        "prompt of 4,096, warm": {**warm, **prompts},
        "prompt of 4,096, in huge pages": {**warm, **prompts, "huge": True},
        "decode step, warm": {**warm, **steps},
        "decode step, in huge pages": {**warm, **steps, "huge": True},
    }


def measure(path: Path, rows: int, group: Path | None, limit: int, only: str) -> dict[str, Any]:
    """Every task, each from an empty page cache; what is warm, in a part that memory holds."""
    found: dict[str, Any] = {}
    for name, task in tasks(limit // 4).items():
        if only not in name:
            continue
        forget(path)
        share = rows if task["limited"] else min(rows, WARM_BYTES // ROW_BYTES)
        found[name] = child({**task, "path": str(path), "rows": share}, group if task["limited"] else None)
    return found


def measure_guard(path: Path, group: Path | None, limit: int) -> dict[str, Any]:
    found = {}
    for name, keep in (("kept in the page cache", True), ("forgotten", False)):
        forget(path)
        task = {"kind": "guard", "path": str(path), "rows": int(0.4 * limit) // ROW_BYTES, "keep": keep}
        found[name] = child(task, group)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gigabytes", type=number_from(0.001, 1e4), default=6.0, help="of the table (default: 6)")
    what = "gigabytes of memory for a process and its page cache (default: 0.5)"
    add("--limit", type=number_from(0.05, 1e4), default=0.5, help=what)
    add("--table", type=Path, metavar="FILE", help="where it is; kept and used again (default: a temporary file)")
    add("--only", default="", metavar="WORD", help="measurements whose name holds this word; weights: the last table")
    add("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task = json.loads(arguments.task)
        if task["group"]:
            (Path(task["group"]) / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(run_task(task)))
        return
    limit, rows = int(arguments.limit * 1e9), int(arguments.gigabytes * 1e9) // ROW_BYTES
    with tempfile.TemporaryDirectory() as folder, memory_group(limit) as group:
        path = arguments.table or Path(folder) / "table"
        if not path.exists() or path.stat().st_size != rows * ROW_BYTES:
            write_table(path, rows)
        if group is None:
            print("No memory control group can be made here: without a limit, each run begins with no page in memory.")
        report: dict[str, Any] = {"gigabytes": arguments.gigabytes, "limit": arguments.limit if group else None}
        report["found"] = measure(path, rows, group, limit, arguments.only)
        report["guard"] = measure_guard(path, group, limit) if arguments.only in "weights" else {}
        report["most_used"] = most_used(group) / 1e9 if group else None
    show(report)


def show(report: dict[str, Any]) -> None:
    lines = [
        [name, f"{f['p50_ms']:,.3f}", f"{f['p99_ms']:,.3f}", f"{f['rows'] / f['seconds']:,.0f}", f"{f['hot']:.1%}",
         f"{f['missing']:.1%}", f"{f['own_mb']:,.0f}"]
        for name, f in report["found"].items()
    ]  # fmt: skip
    if report["most_used"]:
        print(f"The most that the group used: {report['most_used']:.3f} GB of {report['limit']} GB", end="\n\n")
    header = ["n-gram rows", "step ms p50", "p99", "rows/s", "hot", "from the disk", "own memory MB"]
    print(render(header, lines), end="\n\n")
    lines = [
        [name, f"{f['before']:.1%}", f"{f['after']:.1%}", f"{f['gigabytes_a_second']:.2f}"]
        for name, f in report["guard"].items()
    ]
    if lines:
        print(render(["weights that were read are", "table in memory before", "after", "GB/s"], lines), end="\n\n")
    print(json.dumps(report))


def own_memory() -> int:
    """Bytes of this process that lie in no file: what the system cannot take back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main()
