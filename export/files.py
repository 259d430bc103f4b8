"""Reading files of strangers: only regular ones, only up to a size, JSON only up to a number of values. And writing
files whole.

Opening a pipe can block for ever, a device can be endless, and a few megabytes of `[[],[],…` become gigabytes of
Python objects. So the kind of a file is looked at before it is opened, its size before it is read, and the separators
in its bytes are counted before they are parsed.
"""

from __future__ import annotations

import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_VALUES = 3 << 20
"""The header of a file of 150,000 tensors has half of that; at about 100 bytes each they take some 300 MB."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file (or a link to one) to read it.

    Raises:
        OSError: there is none, or it is a pipe, a device, a socket or a folder.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "it is not a regular file")
    return path.open("rb")


def read_small_file(path: Path, error: type[Exception], what: str, max_bytes: int) -> bytes:
    """The bytes of a file of bounded size; every failure is one sentence of type `error`."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            content = b"" if size > max_bytes else stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise error(f"{path} does not exist; expected {what}.") from None
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the name
        raise error(f"{path} cannot be read ({getattr(cause, 'strerror', None) or cause}); expected {what}.") from None
    if max(size, len(content)) > max_bytes:
        raise error(f"{path} is {size:,} bytes, more than the {max_bytes:,} that {what} may have.")
    return content


def read_json_object(path: Path, error: type[Exception], what: str, max_bytes: int) -> dict[str, Any]:
    """Read a JSON object from a file: bounded in size, values and depth, one sentence on every failure."""
    content = read_small_file(path, error, what, max_bytes)
    try:
        value = parse_json(content)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read as JSON ({cause}); expected {what}.") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}, expected an object.")
    return value


def is_finite(value: float) -> bool:
    """Whether a number of strangers is one that a float holds; JSON's integers may be longer than any float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def plain(text: str, limit: int = 300) -> str:
    """Text from a file, fit for a message: cut, and on one line without control characters."""
    cut = text if len(text) <= limit else f"{text[:limit]}…"
    return cut if cut.isprintable() else repr(cut)[1:-1]


def parse_json(content: bytes) -> Any:
    """Parse JSON of UTF-8 bytes.

    Raises:
        ValueError: not JSON, not UTF-8, a key that appears twice, or more values than any file of a checkpoint has.
        RecursionError: nested too deeply.
    """
    if sum(content.count(separator) for separator in b",[{") > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")
    return json.loads(content.decode("utf-8"), object_pairs_hook=no_duplicate_keys)


def no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Hook for `json.loads`: a key that appears twice is an error (Python would silently keep the last value)."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {twice!r:.200}")
    return out


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # a name that cannot be written cannot be removed either
            partial.unlink(missing_ok=True)
