"""Write .safetensors files one tensor at a time, so that a large checkpoint never has to be in memory.

The plan (names, dtypes, shapes) is known first and fixes the header; the values are asked for as they are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import SEEK_CUR
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.checkpoint.safetensors_file import LENGTH_BYTES, NUMPY_DTYPES

ALIGNMENT = 8
"""The header is padded to this, as the reference writer does, so that mapped tensors are aligned."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write: raw name, dtype ("BF16", …) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


Values = Callable[[str], np.ndarray[Any, Any] | None]
"""Gives a tensor's values by its name; None leaves a hole in the file, which reads as zeros and takes no space."""


def write_safetensors(path: Path, plan: Sequence[PlannedTensor], values: Values) -> None:
    """Write a file; `values(name)` gives each tensor in the planned dtype and shape when its turn comes."""
    # Widest elements first keeps every tensor aligned to its own element.
    ordered = sorted(plan, key=lambda t: -NUMPY_DTYPES[t.dtype].itemsize)
    header = _header(ordered)
    path.unlink(missing_ok=True)  # a new file: whoever has the old one mapped would crash if it changed under them
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for tensor in ordered:
            array = values(tensor.name)
            if array is None:
                stream.seek(tensor.nbytes, SEEK_CUR)
                continue
            if array.shape != tensor.shape or array.dtype != NUMPY_DTYPES[tensor.dtype]:
                raise ValueError(f"{tensor.name}: planned {tensor}, got {array.dtype} {array.shape}")
            stream.write(np.ascontiguousarray(array).tobytes())
        stream.truncate()  # a hole at the end is part of the file too


def _header(ordered: Sequence[PlannedTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % ALIGNMENT)
