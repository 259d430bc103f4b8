"""The cache of compiled kernels: each file is made once, different ones at the same time, and old ones go.

Shell scripts are the compilers here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashnext.export.errors import PluginError
from flashnext.plugins import host_build
from flashnext.plugins.host_build import MAX_AGE_S, locked, make, remove_old

COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "compiler 1" && exit
for word; do out="$word"; done  # the last one, after -o
case "$*" in *first.cpp*)
    tries=0
    until ls "$FLASHNEXT_CACHE"/host-kernels/*second*.o 2> /dev/null; do
        tries=$((tries + 1)); [ $tries -gt 200 ] && exit 1; sleep 0.05
    done
esac
touch "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that finishes first.cpp only once second.cpp is compiled."""
    (tmp_path / "compiler").write_text(COMPILER)
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("FLASHNEXT_CACHE", str(tmp_path / "cache"))
    host_build.compiler.cache_clear()
    yield
    monkeypatch.undo()
    host_build.compiler.cache_clear()


def test_different_builds_do_not_wait_for_each_other(compiler: None, tmp_path: Path) -> None:
    sources = [tmp_path / "first.cpp", tmp_path / "second.cpp"]
    for source in sources:
        source.touch()
    with ThreadPoolExecutor(2) as callers:
        made = list(callers.map(lambda s: host_build.build_from([(s, [])], "plain", shared=True, name=s.stem), sources))
    assert all(file.is_file() for file in made)
    assert not list((tmp_path / "cache").rglob(".*"))  # locks, unfinished files


def logging(folder: Path, *more: str) -> list[str]:
    """A command that notes its run, takes a while and makes its file."""
    return ["sh", "-c", f'echo run >> {folder}/log; sleep 0.2; touch "$2"; {"; ".join(more)}', "sh"]


def test_the_same_file_is_made_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as callers:
        for _ in callers.map(lambda _: make(tmp_path / "kernel.o", logging(tmp_path)), range(8)):
            pass
    assert (tmp_path / "log").read_text() == "run\n"
    assert sorted(os.listdir(tmp_path)) == ["kernel.o", "log"]


def test_after_a_failure_the_next_one_tries(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="sh failed"):
        make(tmp_path / "kernel.o", logging(tmp_path, "exit 1"))
    assert not (tmp_path / "kernel.o").exists()
    make(tmp_path / "kernel.o", logging(tmp_path))
    assert (tmp_path / "log").read_text() == "run\nrun\n"


def test_a_lock_that_a_killed_process_left_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / ".kernel.o.lock").touch()
    make(tmp_path / "kernel.o", logging(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["kernel.o", "log"]


def test_what_nobody_used_for_a_month_goes(tmp_path: Path) -> None:
    long_ago = time.time() - MAX_AGE_S - 60
    for name in ("old.o", ".left.lock", ".left.unfinished", "new.o", "used.o"):
        (tmp_path / name).touch()
        if name != "new.o":
            os.utime(tmp_path / name, (long_ago, long_ago))
    with ThreadPoolExecutor(1) as other:
        with locked(tmp_path / "used.o"):  # in use: the one who removes waits, and looks again
            removal = other.submit(remove_old, tmp_path)
            time.sleep(0.2)
            (tmp_path / "used.o").touch()
        removal.result()
    assert sorted(os.listdir(tmp_path)) == ["new.o", "used.o"]
