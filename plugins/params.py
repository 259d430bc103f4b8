"""The kernels' parameter structs, read from their headers, so that their fields are written down only once.

`<op>/params.h` holds one plain struct. The comment of a field says what it is:

    const void* r;    // [tokens, branches, hidden] R     a tensor: shape, and format ("R": what the field R names)
    const float* s;   // [tokens, branches] float32       … or a fixed format
    void* workspace;  // bytes
    void* stream;     // stream
    int32_t tokens;   // size        bound by the tensors' shapes
    int32_t R;        // format      bound by the tensors' dtypes
    float eps;        // attribute

`fill` makes a struct from arrays (NumPy's, PyTorch's, or a TensorRT engine's `DeviceArray`s) and attributes, and checks
every shape.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashnext.export.errors import PluginError
from flashnext.export.ops.schema import evaluate

SOURCES = Path(__file__).parent
FIELD = re.compile(r"^  (?:const )?(void\*|float\*|int32_t\*|int32_t|int64_t|float) (\w+);\s*// (.+)$", re.MULTILINE)
TENSOR = re.compile(r"^\[(.*)\] (\w+)$")
CTYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "float8_e4m3fn": 3, "int32": 4, "uint8": 5}
"""Numbers of `Dtype` in common/dtypes.h."""
ALIGNMENT = 16


class Array(Protocol):
    """What the arrays of all libraries have in common."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True)
class Field:
    """One field; `kind` is "tensor", "bytes", "stream", "size", "format" or "attribute"."""

    name: str
    kind: str
    shape: tuple[str, ...] = ()
    format: str = ""


@dataclass(frozen=True)
class Params:
    """The parameter struct of one op."""

    op: str
    fields: tuple[Field, ...]
    struct: type[ctypes.Structure]


OTHER_NAMES = {
    ("SparseMoE", "nvfp4", "gate_up_scale"): "gate_up_group_scale",
    ("SparseMoE", "nvfp4", "down_scale"): "down_group_scale",
}
"""Ports of the op table that one form has in another format than the others: a field of its own."""


def field_of_port(op: str, form: str, port: str) -> str:
    """The field that takes a port of the op table: one of the same name, with few exceptions."""
    return OTHER_NAMES.get((op, form, port), port)


def read_params(op: str, folder: Path = SOURCES) -> Params:
    """The struct of `folder/<op>/params.h`."""
    text = (folder / op / "params.h").read_text(encoding="utf-8")
    found = FIELD.findall(text)
    fields = tuple(_field(name, comment) for _, name, comment in found)
    members = [(name, CTYPES.get(kind, ctypes.c_void_p)) for kind, name, _ in found]
    return Params(op, fields, type(op, (ctypes.Structure,), {"_fields_": members}))


def _field(name: str, comment: str) -> Field:
    tensor = TENSOR.match(comment)
    if not tensor:
        return Field(name, comment)
    return Field(name, "tensor", tuple(d.strip() for d in tensor[1].split(",")), tensor[2])


def fill(params: Params, values: Mapping[str, Any]) -> ctypes.Structure:
    """The struct for these arrays and attributes; pointers of absent (or None) tensors are null.

    Raises:
        PluginError: a value that the struct has no field for, or an array whose shape, dtype or layout does not fit.
    """
    given = {name: value for name, value in values.items() if value is not None}
    unknown = sorted(set(given) - {f.name for f in params.fields})
    if unknown:
        raise PluginError(f"{params.op} has no parameter {', '.join(unknown)}. Its fields are in {params.op}/params.h.")
    sizes = bound_sizes(params, given)
    for field in params.fields:
        if field.kind == "tensor" and field.name in given:
            _check(params.op, field, given[field.name], sizes)
    pointers = {
        f.name: address(given[f.name]) for f in params.fields if f.kind in ("tensor", "bytes") if f.name in given
    }
    known = {f.name: sizes[f.name] for f in params.fields if f.kind in ("size", "format") and f.name in sizes}
    return params.struct(**{**given, **known, **pointers})


def bound_sizes(params: Params, values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and formats that the values give, or that the shapes and dtypes of the arrays among them bind."""
    sizes: dict[str, Any] = {f.name: values[f.name] for f in params.fields if f.kind == "size" and f.name in values}
    for field in params.fields:
        if field.kind == "tensor" and values.get(field.name) is not None:
            _bind(params.op, field, values[field.name], sizes)
    return sizes


def shape_of(field: Field, sizes: Mapping[str, Any]) -> list[Any]:
    """The shape of a tensor field for these sizes."""
    return [evaluate(int(d) if d.isdigit() else d, sizes) for d in field.shape]


def _bind(op: str, field: Field, array: Array, sizes: dict[str, Any]) -> None:
    if len(array.shape) != len(field.shape):
        raise PluginError(f"{op}: {field.name} must have shape {list(field.shape)}, found {list(array.shape)}.")
    for dim, size in zip(field.shape, array.shape, strict=True):
        if dim.isidentifier():
            sizes.setdefault(dim, size)
    if field.format not in FORMATS:
        sizes.setdefault(field.format, FORMATS.get(dtype_name(array)))


def _check(op: str, field: Field, array: Array, sizes: Mapping[str, Any]) -> None:
    expected = shape_of(field, sizes)
    if expected != list(array.shape):
        raise PluginError(
            f"{op}: {field.name} must have shape {list(field.shape)} = {expected}, found {list(array.shape)}."
        )
    name = dtype_name(array)
    if FORMATS.get(name) != FORMATS.get(field.format, sizes.get(field.format)) or name not in FORMATS:
        raise PluginError(f"{op}: {field.name} has dtype {name}, which is not that of {field.format}.")
    if not is_contiguous(array):
        raise PluginError(f"{op}: {field.name} is not contiguous. Pass a contiguous copy of it.")
    if address(array) % ALIGNMENT:
        raise PluginError(f"{op}: {field.name} does not start at a multiple of {ALIGNMENT} bytes. Pass a copy of it.")


# --- arrays of any kind, without importing PyTorch; those of an engine on a device say `address` ------


def dtype_name(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def address(array: Any) -> int:
    if hasattr(array, "address"):
        return int(array.address)
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def is_contiguous(array: Any) -> bool:
    if hasattr(array, "address"):
        return True
    return bool(array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous)


def byte_count(array: Any) -> int:
    return int(array.nbytes)
