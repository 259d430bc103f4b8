"""A checkpoint's files while they are mapped: whoever computes from them makes sure that they are still whole.

    files = MappedFiles.of(checkpoint)
    with files:                     # raises a CheckpointError at its end if a file was cut short meanwhile
        outputs = session.run(…)

A file can lose its end at any moment. A read of what is missing gives zeros then (`bus_errors.cpp`), and so does the
rest of a file's last page; so what was computed is handed out only after a look at the files. Two things are looked
at: sizes, by a system call per file, and the faults that the handler has counted, which also tell of disks that fail.

Without the handler (no compiler, or another system than Linux), such a read ends the process. Then files are looked at
before they are used too: only one that loses its end during the use itself is fatal.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from weakref import WeakKeyDictionary

import numpy as np

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.runtime.mapped_files import guard

AGAIN = "Download the checkpoint again, do not change it while it runs, and open the bundle anew."


class MappedFiles:
    """Files that have to stay as they were; a context in which they are used. Any number of threads may use it."""

    def __init__(self, files: Sequence[_OpenFile] = ()) -> None:
        self._files = files
        self._by_path = {file.path: file for file in files}
        self._fault: str | None = None
        library, watched = guard.load(), [file.watched for file in files]
        self._damaged = library.flashnext_damaged_file if library is not None and all(watched) else None
        self._watched = np.array([address or 0 for address in watched], np.uint64)
        self._address = self._watched.ctypes.data
        self.survive = self._damaged is not None or not files
        """Whether a read of what a file no longer has lets the process live."""

    @classmethod
    def open(cls, sizes: Mapping[Path, int]) -> MappedFiles:
        """Files with the bytes that each has to have.

        Raises:
            CheckpointError: a file cannot be opened.
        """
        return cls([_OpenFile(path, size) for path, size in sizes.items()])

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> MappedFiles:
        """All files with tensors of a checkpoint; the same object for everyone who asks."""
        if checkpoint not in _OF_CHECKPOINTS:
            _OF_CHECKPOINTS[checkpoint] = cls.open(_sizes(checkpoint))
        return _OF_CHECKPOINTS[checkpoint]

    def only(self, paths: Iterable[Path]) -> MappedFiles:
        """Some of the files."""
        wanted = set(paths)
        return MappedFiles([file for file in self._files if file.path in wanted])

    def check(self) -> None:
        """Raise a CheckpointError if a file is damaged, and from then on always."""
        if self._fault is None:
            damaged = self._first_damaged()
            if damaged is None:
                return
            self._fault = damaged.fault()
        raise CheckpointError(self._fault)

    def descriptor(self, path: Path) -> int:
        """One of the files as the system calls it, to be read without a mapping."""
        return self._by_path[path].descriptor

    def __enter__(self) -> None:
        """Refuse what is known to be damaged; without the handler, look at the files before they are read."""
        if self._fault is not None or not self.survive:
            self.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):  # whatever failed, a damaged file explains it
            self.check()

    def _first_damaged(self) -> _OpenFile | None:
        if not self._files:
            return None
        if self._damaged is None:
            return next((file for file in self._files if file.length() < file.needed), None)
        number = self._damaged(self._address, len(self._files))
        return None if number < 0 else self._files[number]


class _OpenFile:
    """A file, kept open and watched until nobody holds this any more."""

    def __init__(self, path: Path, needed: int) -> None:
        self.path, self.needed = path, needed
        self._fault: str | None = None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise CheckpointError(f"{path} cannot be read ({cause.strerror or cause}).") from None
        library = guard.load()
        self.watched: int | None = None
        if library is not None:
            self.watched = library.flashnext_watch_file(self.descriptor, needed)
        weakref.finalize(self, _close, self.descriptor, self.watched).atexit = False

    def length(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_END)

    def fault(self) -> str:
        """What is wrong with it: the same sentence for everyone who meets it."""
        if self._fault is None:
            length = self.length()
            if length < self.needed:
                reason = f"has become shorter while it was in use: {length:,} of {self.needed:,} bytes."
            else:
                reason = "could not be read while it was in use: its disk fails, or it was cut short for a moment."
            self._fault = f"{self.path} {reason} {AGAIN}"
        return self._fault


_OF_CHECKPOINTS: WeakKeyDictionary[Checkpoint, MappedFiles] = WeakKeyDictionary()


def _sizes(checkpoint: Checkpoint) -> dict[Path, int]:
    """Bytes of each file that its tensors need."""
    sizes: dict[Path, int] = {}
    for info in (*checkpoint.tensors.values(), *checkpoint.cache_scales.values()):
        sizes[info.file] = max(sizes.get(info.file, 0), info.offset + info.length)
    return sizes


def _close(descriptor: int, watched: int | None) -> None:
    library = guard.load()
    if library is not None and watched is not None:
        library.flashnext_unwatch_file(watched)
    os.close(descriptor)
