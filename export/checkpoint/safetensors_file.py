"""Headers of .safetensors files, parsed by hand, and read-only views of the tensors in them.

A file is: header length (u64, little endian), a JSON header `{name: {dtype, shape, data_offsets}}`, then the tensors'
bytes. Everything in the header is checked before it is believed: its length against the file, every dtype, every
shape against its offsets, and that the tensors tile the rest of the file without overlap, gap or excess (a gap or
excess means a damaged download; the format forbids both).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashnext.export.errors import CheckpointError
from flashnext.export.files import open_regular, parse_json

MAX_HEADER_BYTES = 32 << 20
"""150,000 tensors in one file take about 20 MB of header; the official model has fewer per shard."""
MAX_DIMENSIONS = 8
LENGTH_BYTES = 8

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    `name` is the name inside this project (the checkpoint's prefix stripped), `raw_name` the one in the file. `file`
    is the real path (a hub cache's shards are links), `offset` counts bytes from the start of that file.
    """

    name: str
    raw_name: str
    file: Path
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file by their names in the file.

    Raises:
        CheckpointError: not readable, truncated, or a header that contradicts itself or the file.
    """
    with _faults_of(path):
        return _read_header(path.resolve(strict=True))


def data_start(path: Path) -> int:
    """Offset of the first tensor's bytes: where the header ends, by the length that it claims.

    Raises:
        CheckpointError: not readable, or the header would end beyond the file.
    """
    with _faults_of(path), open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        return LENGTH_BYTES + _checked_header_length(stream.read(LENGTH_BYTES), size)


def map_file(file: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The whole file as read-only mapped bytes; pages are read when they are touched."""
    return np.memmap(file, dtype=np.uint8, mode="r")


def tensor_view(mapped: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    """A tensor as a read-only view of its mapped file."""
    return np.ndarray(info.shape, NUMPY_DTYPES[info.dtype], buffer=mapped, offset=info.offset)


def shown(name: str) -> str:
    """A name from a file, fit for one line of a message."""
    return name if name.isprintable() and len(name) <= 200 else f"{name!r:.200}"


class _DamagedError(Exception):
    """What is wrong with a header; becomes one CheckpointError that names the file."""


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise CheckpointError(
            f"{path} cannot be read ({cause.strerror or cause}). Check its permissions, or download it again."
        ) from None
    except (_DamagedError, ValueError, RuntimeError) as cause:  # RuntimeError: too deep JSON, or a loop of links
        raise CheckpointError(f"{path} is not a sound safetensors file: {cause}. Download it again.") from None


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = _checked_header_length(stream.read(LENGTH_BYTES), size)
        header = parse_json(stream.read(length))
    if not isinstance(header, dict):
        raise _DamagedError(f"its header is a JSON {type(header).__name__}, not an object")
    start = LENGTH_BYTES + length
    infos = {k: _tensor(file, k, v, start) for k, v in header.items() if k != "__metadata__"}
    _check_tiling(list(infos.values()), start, size)
    return infos


def _checked_header_length(first: bytes, size: int) -> int:
    if len(first) < LENGTH_BYTES:
        raise _DamagedError(f"it has only {len(first)} bytes")
    length = int.from_bytes(first, "little")
    if length > size - LENGTH_BYTES:
        raise _DamagedError(f"its header claims {length:,} bytes, the file has {size:,}")
    if length > MAX_HEADER_BYTES:
        raise _DamagedError(f"its header claims {length:,} bytes, more than the {MAX_HEADER_BYTES:,} allowed")
    return length


def _tensor(file: Path, name: str, raw: Any, start: int) -> TensorInfo:
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise _DamagedError(f"tensor {shown(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise _DamagedError(f"tensor {shown(name)} has the unknown dtype {dtype!r:.40}")
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {shown(name)} has the impossible shape {shape!r:.80}")
    if not _sizes(offsets) or len(offsets) != 2:
        raise _DamagedError(f"tensor {shown(name)} has impossible data_offsets {offsets!r:.80}")
    begin, end = offsets
    needed = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if end - begin != needed:
        raise _DamagedError(
            f"tensor {shown(name)} ({dtype} {shape}) takes {needed:,} bytes, its offsets {end - begin:,}"
        )
    return TensorInfo(name, name, file, start + begin, needed, dtype, tuple(shape))


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 62 for i in value)


def _check_tiling(infos: list[TensorInfo], start: int, size: int) -> None:
    end = start
    for info in sorted(infos, key=lambda i: (i.offset, i.length)):
        if info.offset != end:
            problem = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise _DamagedError(f"tensor {shown(info.name)} {problem}")
        end = info.offset + info.length
        if end > size:
            raise _DamagedError(f"tensor {shown(info.name)} ends at byte {end:,}, the file at {size:,} (truncated)")
    if end != size:
        raise _DamagedError(f"{size - end:,} bytes after the last tensor belong to none")
