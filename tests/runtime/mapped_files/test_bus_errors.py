"""Reads beyond the end of a mapped file: survived where the file is watched, fatal everywhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext.runtime.mapped_files import guard

pytestmark = pytest.mark.skipif(guard.load() is None, reason="there is no handler here: no Linux, or no compiler")

PAGES = 10_000
START = f"""
import faulthandler, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from flashnext.export.errors import CheckpointError
from flashnext.runtime.mapped_files.files import MappedFiles

SIZE = {PAGES} * 4096
watched, foreign = (Path(sys.argv[1]) / name for name in ("watched", "foreign"))
for file in (watched, foreign):
    file.write_bytes(b"1" * SIZE)

def mapped(file):
    return np.memmap(file, np.uint8, "r")

def outcome(files, read):
    try:
        with files:
            print(read())
    except CheckpointError as error:
        print(error)
"""


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START + code, tmp_path], capture_output=True, text=True, check=False)


def lines(tmp_path: Path, code: str) -> list[str]:
    ended = run(tmp_path, code + "\nprint('alive')")
    assert ended.returncode == 0, ended.stderr
    *printed, last = ended.stdout.splitlines()
    assert last == "alive"
    return printed


def test_a_cut_file_reads_as_zeros_and_is_an_error(tmp_path: Path) -> None:
    code = """
files, array = MappedFiles.open({watched: SIZE}), mapped(watched)
outcome(files, lambda: array[::4096].sum())
os.truncate(watched, 5000 * 4096)
outcome(files, lambda: array[::4096].sum())
watched.write_bytes(b"1" * SIZE)
outcome(files, lambda: "not read")
print(array[::4096].sum())
outcome(MappedFiles.open({watched: SIZE}), lambda: mapped(watched)[::4096].sum())
"""
    one = ord("1")
    sound, zeros, cut, still_cut, still_zeros, anew = lines(tmp_path, code)
    assert sound == anew == str(PAGES * one)
    assert zeros == str(5000 * one)
    assert f"watched has become shorter while it was in use: {5000 * 4096:,} of {PAGES * 4096:,} bytes." in cut
    assert "Download the checkpoint again" in cut
    assert still_zeros == zeros, "a mapping stays as it is when the file is whole again"
    assert still_cut == cut


def test_the_end_of_the_last_page_is_missed_too(tmp_path: Path) -> None:
    """Nothing is raised for it: the system gives zeros."""
    code = """
files, array = MappedFiles.open({watched: SIZE}), mapped(watched)
os.truncate(watched, SIZE - 1)
outcome(files, lambda: array[-1])
"""
    printed, cut = lines(tmp_path, code)
    assert printed == "0"
    assert "has become shorter" in cut


def test_a_file_that_could_not_be_read_for_a_moment(tmp_path: Path) -> None:
    """What was read is wrong, though the size is right at the end; so it is with a disk that fails."""
    code = """
files, array = MappedFiles.open({watched: SIZE}), mapped(watched)
def read():
    os.truncate(watched, 0)
    found = array[8000 * 4096]
    os.truncate(watched, SIZE)
    return found
outcome(files, read)
"""
    printed, error = lines(tmp_path, code)
    assert printed == "0"
    assert "watched could not be read while it was in use: its disk fails, or it was cut short for a moment." in error


def test_many_threads_at_once_and_several_mappings(tmp_path: Path) -> None:
    code = """
files, arrays = MappedFiles.open({watched: SIZE}), [mapped(watched) for _ in range(4)]
parts = [part for array in arrays for part in np.split(array, 10)]
os.truncate(watched, 4096)
with ThreadPoolExecutor(16) as pool:
    outcome(files, lambda: sum(int(s) for s in pool.map(np.sum, parts)))
"""
    printed, cut = lines(tmp_path, code)
    assert printed == str(4 * 4096 * ord("1"))
    assert "has become shorter" in cut


@pytest.mark.parametrize("watch", ["", "files = MappedFiles.open({watched: SIZE})"])
def test_a_foreign_file_ends_the_process_as_ever(tmp_path: Path, watch: str) -> None:
    code = f"""
{watch}
array = mapped(foreign)
os.truncate(foreign, 0)
print(array[0])
"""
    ended = run(tmp_path, code)
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "")


def test_a_file_that_is_no_longer_watched_ends_the_process(tmp_path: Path) -> None:
    code = """
files, array = MappedFiles.open({watched: SIZE}), mapped(watched)
some = files.only([watched])
del files
os.truncate(watched, 4096 * 100)
print(array[200 * 4096], flush=True)
del some
print(array[150 * 4096])
"""
    ended = run(tmp_path, code)
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "0\n")


def test_a_signal_that_is_sent_ends_the_process(tmp_path: Path) -> None:
    ended = run(
        tmp_path, "files = MappedFiles.open({watched: SIZE})\nos.kill(os.getpid(), signal.SIGBUS)\nprint('here')"
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "")


BEFORE = "faulthandler.enable()\nfiles = MappedFiles.open({watched: SIZE})"
AFTER = "files = MappedFiles.open({watched: SIZE})\nfaulthandler.enable()"
DISABLED = f"{BEFORE}\nfaulthandler.disable()\nother = MappedFiles.open({{foreign: SIZE}})"


@pytest.mark.parametrize("order", [BEFORE, AFTER, DISABLED])
def test_beside_pythons_faulthandler(tmp_path: Path, order: str) -> None:
    code = f"""
{order}
array = mapped(watched)
os.truncate(watched, 0)
outcome(files, lambda: array[9 * 4096] + array[4096])
"""
    printed, cut = lines(tmp_path, code)
    assert printed == "0"
    assert "has become shorter" in cut


@pytest.mark.parametrize("order", [BEFORE, AFTER])
def test_pythons_faulthandler_reports_foreign_files(tmp_path: Path, order: str) -> None:
    ended = run(tmp_path, f"{order}\narray = mapped(foreign)\nos.truncate(foreign, 0)\nprint(array[0])")
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "")
    assert ended.stderr.count("Fatal Python error: Bus error") == 1


PYTHONS = "signal.signal(signal.SIGBUS, lambda *_: print('called'))"
IGNORED = "signal.signal(signal.SIGBUS, signal.SIG_IGN)"


@pytest.mark.parametrize(("earlier", "called"), [(PYTHONS, ["called"]), (IGNORED, [])])
def test_a_signal_that_somebody_handled_before_leaves_the_handler(
    tmp_path: Path, earlier: str, called: list[str]
) -> None:
    """One that is sent goes to him, and a file that is cut afterwards is still an error and no endless loop."""
    code = f"""
{earlier}
files, array = MappedFiles.open({{watched: SIZE}}), mapped(watched)
os.kill(os.getpid(), signal.SIGBUS)
signal.setitimer(signal.ITIMER_REAL, 20)
os.truncate(watched, 0)
outcome(files, lambda: array[4096])
"""
    *before, zero, cut = lines(tmp_path, code)
    assert (before, zero) == (called, "0")
    assert "has become shorter" in cut


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """Of the file itself and of one that is mapped below it: their bytes are in what the handler reads."""
    code = r"""
folder = Path(os.fsdecode(os.fsencode(sys.argv[1]) + b"/\xff"))
folder.mkdir()
odd, plain = folder / "odd", watched
odd.write_bytes(b"1" * SIZE)
for file in (plain, odd):
    files, array, below = MappedFiles.open({file: SIZE}), mapped(file), mapped(odd)
    os.truncate(file, 0)
    try:
        with files:
            print(files.survive, array[4096])
    except CheckpointError as error:
        print("shorter" in str(error))
"""
    assert lines(tmp_path, code) == ["True 0", "True"] * 2
