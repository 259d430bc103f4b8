"""Strings from an R package's lazy-load database, without R.

The file is a row of records: four bytes that give the length of an object, then a zlib stream with the object,
serialized in XDR format (R Internals, section 1.8). The first character vector of an object is found by its type
word and read item by item; the rest of the object is of no use here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

LENGTH_BYTES = 4
STRING_VECTOR = 16
STRING = 9
MIN_LINES = 1000
"""Shorter vectors are names and attributes, not books."""


def strings_of_database(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each book in a database of character vectors: its first line that is not empty, and all its lines."""
    data = path.read_bytes()
    while len(data) > LENGTH_BYTES:
        stream = zlib.decompressobj()
        vector = _first_vector(stream.decompress(data[LENGTH_BYTES:]))
        data = stream.unused_data
        if len(vector) >= MIN_LINES:
            yield _title(vector), vector


def _first_vector(data: bytes) -> list[str]:
    place = 0
    while (place := data.find(struct.pack(">I", STRING_VECTOR), place)) >= 0:
        if vector := _vector(data, place + 4):
            return vector
        place += 4
    return []


def _vector(data: bytes, place: int) -> list[str]:
    (count,) = struct.unpack_from(">I", data, place)
    place += 4
    out = []
    for _ in range(count):
        if place + 8 > len(data) or data[place + 3] != STRING:
            return []
        (length,) = struct.unpack_from(">i", data, place + 4)
        out.append(data[place + 8 : place + 8 + max(length, 0)].decode("utf-8", errors="replace"))
        place += 8 + max(length, 0)
    return out


def _title(lines: list[str]) -> str:
    return next(line.strip() for line in lines if line.strip()).title()
