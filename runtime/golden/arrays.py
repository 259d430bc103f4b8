"""Arrays in Polygraphy's JSON, read as data from strangers: kind, dtype and shape are known before memory is taken.

Polygraphy writes an array as `{"array": base64 of .npy, "polygraphy_class": "ndarray"}`, and a tensor of a dtype that
numpy lacks as `{"tensor": base64 of torch.save, …}`. Its own reader makes whatever the file asks for. The writer is
Polygraphy's own (`write.py`).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.errors import GoldenError
from flashnext.export.files import parse_json, plain, read_small_file
from flashnext.export.graphs.manifest import TensorSpec
from flashnext.runtime.engines.base import Array, numpy_dtype

TEXT_PER_BYTE = 1.5
"""Base64 takes 4/3; what is more is for names and headers."""
ROOM_FOR_HEADERS = 1 << 20
MAGIC = b"\x93NUMPY\x01\x00\x76\x00"
"""What .npy begins with: its name, its version and the length of the header."""


def read_text(path: Path, specs: Mapping[str, tuple[TensorSpec, tuple[int, ...]]]) -> Any:
    """Parse a file whose arrays are these, without decoding them.

    Raises:
        GoldenError: the file cannot be read, is not JSON, or is larger than such arrays are.
    """
    most = sum(_nbytes(spec, shape) for spec, shape in specs.values())
    content = read_small_file(path, GoldenError, "saved arrays", int(most * TEXT_PER_BYTE) + ROOM_FOR_HEADERS)
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as cause:
        raise GoldenError(f"{path} cannot be read as JSON ({cause}). Write it again with `flashnext golden`.") from None


def decode(value: Any, spec: TensorSpec, shape: tuple[int, ...], path: Path) -> Array:
    """An array of this dtype and shape.

    Raises:
        GoldenError: it is something else.
    """
    if isinstance(value, dict) and isinstance(value.get("values"), dict):  # an output is wrapped once more
        value = value["values"]
    try:
        array = _tensor(value) if "tensor" in value else _ndarray(value["array"], spec, shape)
    except (KeyError, TypeError, ValueError, RuntimeError, binascii.Error) as cause:
        raise GoldenError(
            f"{path} has no array for {plain(spec.name)} ({plain(str(cause), 200)}). "
            "Write it again with `flashnext golden`."
        ) from None
    if array.dtype != numpy_dtype(spec.dtype) or array.shape != shape:
        raise GoldenError(
            f"{path} has {spec.name} as {array.dtype.name} {list(array.shape)}, expected {spec.dtype} {list(shape)}. "
            "It belongs to another bundle; write it again with `flashnext golden`."
        )
    return array


def _ndarray(text: str, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """From .npy, whose header has to be the one that numpy writes for such an array."""
    data = base64.b64decode(text, validate=True)
    dtype = numpy_dtype(spec.dtype)
    expected = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(expected, facts)  # type: ignore[no-untyped-call]
    header = expected.getvalue()
    if not data.startswith(header):
        found = data[len(MAGIC) : len(header)].decode("latin-1").strip()
        raise ValueError(f"found {plain(found, 80)}, expected {spec.dtype} {list(shape)}")
    if len(data) - len(header) != _nbytes(spec, shape):
        raise ValueError("its bytes are not as many as its header says")
    return np.frombuffer(data, dtype, offset=len(header)).reshape(shape)


def _tensor(value: Mapping[str, str]) -> Array:
    """From torch.save; `weights_only` lets PyTorch make nothing but tensors."""
    import torch

    from flashnext.runtime.engines.torch_engine import to_numpy

    data = base64.b64decode(value["tensor"], validate=True)
    try:
        tensor = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as cause:  # PyTorch's own errors, of many kinds
        raise ValueError(str(cause).split("\n", 1)[0]) from None
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("not a tensor")
    return to_numpy(tensor, str(tensor.dtype).removeprefix("torch."))


def _nbytes(spec: TensorSpec, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * numpy_dtype(spec.dtype).itemsize
