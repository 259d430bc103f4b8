"""Identity of a checkpoint: one SHA-256 that a bundle keeps, to notice that its weights have changed.

Hashing 360 GB would take minutes, so it covers config.json, the index, and of each shard its name, size, header and
samples of 64 KiB spread evenly over the file; shards of up to 8 MiB are read whole. The folder's path is not part of
it: a checkpoint may move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from flashnext.export.checkpoint.safetensors_file import data_start
from flashnext.export.checkpoint.shards import INDEX_NAME, MAX_INDEX_BYTES, shard_files
from flashnext.export.config import MAX_CONFIG_BYTES
from flashnext.export.errors import CheckpointError
from flashnext.export.files import open_regular, read_small_file

SAMPLE_BYTES = 64 << 10
SAMPLES = 16
WHOLE_BYTES = 8 << 20


def identity(folder: str | Path) -> str:
    """Hex SHA-256 of what a checkpoint folder holds.

    Raises:
        CheckpointError: a file is absent, unreadable or damaged.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(Path(folder)):
            # Each part's length goes first, so that bytes cannot wander from one part to the next unnoticed.
            digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as cause:
        raise CheckpointError(f"The checkpoint {folder} cannot be read ({cause}).") from None
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    yield read_small_file(folder / "config.json", CheckpointError, "a checkpoint's configuration", MAX_CONFIG_BYTES)
    index = folder / INDEX_NAME
    known = index.exists()
    yield read_small_file(index, CheckpointError, "a checkpoint's index", MAX_INDEX_BYTES) if known else b""
    for shard in shard_files(folder):
        yield shard.name.encode()
        yield from _shard_parts(shard)


def _shard_parts(shard: Path) -> Iterator[bytes]:
    size = shard.stat().st_size
    header = data_start(shard)
    yield size.to_bytes(8, "little")
    with open_regular(shard) as stream:
        yield stream.read(header)
        if size <= WHOLE_BYTES:
            yield stream.read()
            return
        last = max(header, size - SAMPLE_BYTES)
        for i in range(SAMPLES):
            stream.seek(header + (last - header) * i // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)
