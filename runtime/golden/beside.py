"""Files in a folder that is not ours alone: those of golden files beside a checkpoint's weights.

They appear together or not at all, under a prefix of their own, by which the next writer of the same golden folder
finds those that it no longer has.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DIGITS = 8


def prefix(target: Path) -> str:
    """`golden-1f2e3d4c.` for a golden folder: its name, and a part of its path's hash.

    Links above the folder are followed, the folder itself is not: writing it replaces a link.
    """
    path = target.absolute().parent.resolve() / target.absolute().name
    return f"{path.name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:DIGITS]}."


def remove_others(folder: Path, start: str, kept: Iterable[str]) -> None:
    """Remove what an earlier run left under a prefix, but for the names that are kept; as far as it may be."""
    names = set(kept)
    for path in list(folder.iterdir()):
        if path.name.startswith((start, f".{start}")) and path.name not in names and not path.is_dir():
            with suppress(OSError):
                path.unlink()


@contextmanager
def named_together(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Where to write the file of a name: hidden until the block ends well, gone if it fails.

    Raises:
        OSError: a file cannot take its place.
    """
    token = secrets.token_hex(4)
    hidden: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        return hidden.setdefault(name, folder / f".{name}.{token}.part")

    try:
        yield path_of
        for name, path in hidden.items():
            if path.exists():
                os.replace(path, folder / name)
    finally:
        for path in hidden.values():
            path.unlink(missing_ok=True)
