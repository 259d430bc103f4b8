"""A folder that appears whole or not at all, whatever happens to the process that writes it.

    with whole_or_nothing(Path("bundle")) as folder:
        (folder / "file").write_text("…")

What is written goes into a hidden folder beside the target, which is renamed at the end. A process that is killed
leaves the hidden folder behind; the next one to write the same target removes it. It tells leftovers from the folder
of a process at work by a lock on the folder, which the system lets go of when its process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashnext.export.errors import BundleError

OLD = "old"
"""Kind of the hidden folder that holds the target's former content, in a folder of its own, while it is replaced."""
WORK = "new"


@contextmanager
def whole_or_nothing(target: Path, what: str = "The bundle") -> Iterator[Path]:
    """A folder to write into that becomes `target` when the block ends well and vanishes otherwise.

    `what` is written, in the words of its errors.

    Raises:
        BundleError: it cannot be made or written.
    """
    target = target.absolute()
    work = _hidden_path(target, WORK)
    try:  # before the folder is there, so that an interruption at any moment removes it
        _make(work, target, what)
        with _locked(work):
            yield work
            work.chmod(0o755)
            _replace(work, target)
    except OSError as cause:
        raise BundleError(f"{what} could not be written to {target} ({cause}); nothing was kept.") from cause
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make(work: Path, target: Path, what: str) -> None:
    try:
        _tidy(target)
        work.mkdir(0o700)
    except OSError as cause:
        raise BundleError(f"{what} cannot be written beside {target} ({cause}); name another folder.") from None


def _hidden_path(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(4)}")


def _replace(work: Path, target: Path) -> None:
    """Move `work` to `target`; what is there steps aside first and goes once the new one is in place."""
    if not target.exists():
        os.replace(work, target)
        return
    old = _hidden_path(target, OLD)
    old.mkdir(0o700)
    with _locked(old):
        os.replace(target, old / target.name)
        try:
            os.replace(work, target)
        except OSError:
            os.replace(old / target.name, target)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _tidy(target: Path) -> None:
    """Remove what killed processes have left; a bundle that one of them had moved aside comes back first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.({OLD}|{WORK})-[a-z0-9_]{{8}}")
    for leftover in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(leftover.name)
        if not match or leftover.is_symlink() or not leftover.is_dir() or _in_use(leftover):
            continue
        if match[1] == OLD and (leftover / target.name).is_dir() and not target.exists():
            os.replace(leftover / target.name, target)
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _in_use(folder: Path) -> bool:
    """Whether a process holds the lock; where the file system knows no locks, better yes than no."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
