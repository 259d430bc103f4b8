"""Initializers that point into the checkpoint's own safetensors files: nothing is loaded, nothing is rewritten.

ONNX external data names a file, an offset and a length. A safetensors file stores each tensor as one contiguous run
of bytes, so a graph can use them where they lie. Locations are relative to the checkpoint's common parent folder
(real paths: a hub cache is symbolic links into `blobs/`).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import TensorInfo

_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
}


def point_to_checkpoint(model: ir.Model, checkpoint: Checkpoint, constants: dict[str, ir.TensorProtocol]) -> int:
    """Point every initializer that is a checkpoint tensor into its file; the rest must be in `constants`.

    Returns the number of initializers that point into the checkpoint.
    """
    pointed = 0
    for name, value in model.graph.initializers.items():
        if name in constants:
            value.const_value = constants[name]
        elif name in checkpoint.tensors:
            value.const_value = external_tensor(checkpoint.tensors[name], checkpoint.common_parent)
            pointed += 1
        elif value.const_value is None:
            raise AssertionError(f"initializer {name} is neither a checkpoint tensor nor a constant")
    return pointed


def external_tensor(info: TensorInfo, parent: Path) -> ir.ExternalTensor:
    """A tensor of the checkpoint as ONNX external data, located relative to `parent`."""
    return ir.ExternalTensor(
        location=info.file.relative_to(parent).as_posix(),
        offset=info.offset,
        length=info.length,
        dtype=_DTYPES[info.dtype],
        shape=ir.Shape(info.shape),
        name=info.name,
        base_dir=parent,
    )
