"""Runs one launch in a process of its own, in the program of host/replay.cpp (which describes the files).

This is how the sanitizer builds run: every buffer becomes memory of exactly its length in that process, and is copied
back from it. A launch file can be kept and run again by hand: `replay-address-… launch result`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
TOTALS = struct.Struct("6Q")
STATUS_BASE = 100
SANITIZER_FOUND = -1


class Buffer(NamedTuple):
    """One buffer of a launch: where its pointer is in the parameters, where the buffer is, and its length."""

    offset: int
    address: int
    length: int


class Result(NamedTuple):
    """Status 0 and the totals, or another status and the program's messages."""

    status: int
    message: str
    totals: Sequence[int]


def replay(
    program: Path,
    op: str,
    params: ctypes.Structure,
    buffers: Sequence[Buffer],
    execution: tuple[int, int, int, int],
) -> Result:
    """Run the launch; `execution` is (schedule, late_copies, seed, watch). Buffers change only if it succeeds."""
    schedule, late_copies, seed, watch = execution
    if len({b.address for b in buffers}) != len(buffers):
        raise ValueError("a launch with two names for one buffer cannot be replayed; pass copies")
    with tempfile.TemporaryDirectory() as folder:
        launch, result = Path(folder) / "launch", Path(folder) / "result"
        with launch.open("wb") as file:
            header = (len(op), ctypes.sizeof(params), len(buffers), schedule, late_copies, seed, watch)
            file.write(struct.pack("5qQq", *header) + op.encode() + bytes(params))
            for buffer in buffers:
                file.write(struct.pack("2q", buffer.offset, buffer.length))
                file.write(ctypes.string_at(buffer.address, buffer.length))
        run = subprocess.run(
            [*_fixed_addresses(), str(program), str(launch), str(result)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
        if run.returncode:
            status = run.returncode - STATUS_BASE
            return Result(status if status > 0 else SANITIZER_FOUND, run.stderr, ())
        data = result.read_bytes()
    for buffer in buffers:
        ctypes.memmove(buffer.address, data[: buffer.length], buffer.length)
        data = data[buffer.length :]
    return Result(0, "", TOTALS.unpack(data))


def _fixed_addresses() -> list[str]:
    """ThreadSanitizer cannot start where the system randomises addresses more than it knows of."""
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if setarch else []
