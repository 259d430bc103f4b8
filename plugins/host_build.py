"""Builds the kernels for the host execution with g++, on first use, into a cache folder.

Every source becomes an object file that is named by a hash of all it is made from (the source, the headers that it
includes, the flags, the compiler), so a change compiles only what it touches. The folder is `host-kernels` under
$FLASHNEXT_CACHE or ~/.cache/flashnext; what nobody used for a month is removed from it. Processes may build side by
side: each file is made once, and who needs the same one waits for it.

Kinds of build: "plain" gives a shared library that is loaded into this process; "address" (with the undefined-behaviour
sanitizer) and "thread" give the program of host/replay.cpp, since a sanitizer has to be there from a process's start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from flashnext.export.errors import PluginError

SOURCES = Path(__file__).parent
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
COMMON = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
# The runtime moves stacks and is never instrumented; its loops over shared memory must not become calls to memset,
# which the sanitizers would take for accesses by the running thread.
RUNTIME = ["-O2", "-fno-builtin", "-fno-tree-loop-distribute-patterns"]
KERNEL = ["-fno-strict-aliasing"]
# -Og compiles an instrumented kernel four times as fast as -O2, and the cases of sanitizer tests are small.
BUILDS = {
    "plain": ["-O2"],
    "address": ["-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-Og", "-g1", "-fsanitize=thread"],
}
MAX_COMPILERS = 8
Job = tuple[Path, Sequence[str]]
"""A source and the flags that it is compiled with."""
MAX_AGE_S = 30 * 24 * 3600


def kernel_sources() -> list[Path]:
    """The kernel sources of all ops."""
    return sorted(SOURCES.glob("*/*.cu"))


def build(kind: str = "plain", kernels: Sequence[Path] | None = None, flags: Sequence[str] = ()) -> Path:
    """The shared library ("plain") or the replay program of these kernels (default: all), built if need be.

    Raises:
        PluginError: there is no g++, or it fails.
    """
    program = [] if kind == "plain" else [(SOURCES / "host/replay.cpp", [*COMMON, *RUNTIME])]
    return build_from([*program, *kernel_jobs(kind, kernels, flags)], kind, shared=kind == "plain")


def kernel_jobs(kind: str = "plain", kernels: Sequence[Path] | None = None, flags: Sequence[str] = ()) -> list[Job]:
    """What a library or program with these kernels (default: all) is compiled from."""
    kernels = kernel_sources() if kernels is None else kernels
    runtime = [s for s in sorted(SOURCES.glob("host/*.cpp")) if s.name != "replay.cpp"]
    jobs: list[Job] = [(s, [*COMMON, *RUNTIME]) for s in runtime]
    return jobs + [(s, [*COMMON, *KERNEL, *BUILDS[kind], *flags]) for s in (SOURCES / "abi.cpp", *kernels)]


def build_from(jobs: Sequence[Job], kind: str, shared: bool, name: str = "", link: Sequence[str] = ()) -> Path:
    """Compile and link what is not there yet.

    Raises:
        PluginError: there is no g++, or it fails.
    """
    folder = cache_folder()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
        objects = list(pool.map(lambda job: _compile(folder, *job), jobs))
    result = _link(folder, objects, kind, shared, name or ("kernels" if shared else "replay"), link)
    remove_old(folder)
    return result


def cache_folder() -> Path:
    root = os.environ.get("FLASHNEXT_CACHE")
    folder = (Path(root) if root else Path.home() / ".cache/flashnext") / "host-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def compiler() -> tuple[str, str]:
    """Path and version of g++."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if not path:
        raise PluginError(
            "The host execution of the kernels is compiled with g++ 11 or newer, which is not here. Install it (Debian "
            "and Ubuntu: apt-get install g++), or name a compiler in CXX."
        )
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=True)
        return path, run.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise PluginError(
            f"{path} does not say its version when called with --version, so it is no usable compiler. Name g++ 11 or "
            "newer in CXX."
        ) from None


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """One thread of all processes at a time makes or removes a file.

    The lock is a file beside it that goes when it is let go of. Who has waited for one that is gone takes the next.
    """
    path = target.with_name(f".{target.name}.lock")
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_at(lock, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _compile(folder: Path, source: Path, flags: Sequence[str]) -> Path:
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    flags = [*flags, f"-I{SOURCES}", *language]
    target = folder / f"{source.parent.name}-{source.stem}-{source_key(source, [compiler()[1], *flags])}.o"
    return make(target, [compiler()[0], *flags, "-c", str(source)])


def _link(folder: Path, objects: Sequence[Path], kind: str, shared: bool, name: str, flags: Sequence[str]) -> Path:
    flags = [*flags, *BUILDS[kind], "-ldl"] + (["-shared"] if shared else [])
    key = digest([*(o.name for o in objects), *flags])
    target = folder / (f"{name}-{key}.so" if shared else f"{name}-{kind}-{key}")
    return make(target, [compiler()[0], *map(str, objects), *flags])


def make(target: Path, command: Sequence[str]) -> Path:
    """Run the command (which gets `-o target`) unless the target is there.

    Raises:
        PluginError: the command fails.
    """
    if target.exists() and not os.access(
        target.parent, os.W_OK
    ):  # a cache that is only read: its age matters to nobody
        return target
    with locked(target):
        if target.exists():
            target.touch()
        else:
            _run(command, target)
    return target


def _run(command: Sequence[str], target: Path) -> None:
    unfinished = target.with_name(f".{target.name}.unfinished")
    run = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
    if run.returncode:
        name = Path(command[0]).name
        raise PluginError(f"{name} failed. The command:\n{' '.join(command)}\nIts messages:\n{run.stderr}")
    unfinished.replace(target)


def digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def source_key(source: Path, circumstances: Sequence[str]) -> str:
    """Hash of a source, the headers that it includes, and how it is compiled."""
    files = [f"{file}\n{file.read_text(encoding='utf-8')}" for file in sorted(_with_headers(source))]
    return digest([*circumstances, *files])


def _with_headers(source: Path) -> set[Path]:
    """The source and everything it includes by a quoted name, which is relative to its own folder or to plugins/."""
    found: set[Path] = set()
    todo = [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found.add(file)
        names = INCLUDE.findall(file.read_text(encoding="utf-8"))
        todo += [p for n in names for p in (file.parent / n, SOURCES / n) if p.is_file()]
    return found


def remove_old(folder: Path) -> None:
    """Remove the folder's files that nobody used for a month, and what killed processes have left as long."""
    for file in folder.iterdir():
        if _is_old(file):
            with locked(file):
                if _is_old(file):  # still: who uses a file says so under its lock
                    file.unlink(missing_ok=True)


def _is_old(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_mtime < time.time() - MAX_AGE_S
    except FileNotFoundError:
        return False
