"""A bundle's graphs as a builder may take them: unchanged since the export, with weights inside the checkpoint's files.

TensorRT reads external data wherever a graph says. So names, offsets and lengths are compared with the files first.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from pathlib import Path

import onnx

from flashnext.export.errors import BundleError
from flashnext.export.files import plain, read_small_file
from flashnext.export.graphs.manifest import GraphSpec, Manifest

MAX_GRAPH_BYTES = 1 << 31
"""What protobuf can hold at all."""
BYTES_OF = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.FLOAT16: 2,
    onnx.TensorProto.BFLOAT16: 2,
    onnx.TensorProto.FLOAT8E4M3FN: 1,
}
"""Bytes of an element of the dtypes that weights of a checkpoint have."""


def read_graph(bundle: Path, spec: GraphSpec) -> bytes:
    """A graph's bytes, as the export wrote them.

    Raises:
        BundleError: they cannot be read or are others.
    """
    path = bundle / spec.file
    content = read_small_file(path, BundleError, "a bundle's graph", MAX_GRAPH_BYTES)
    if hashlib.sha256(content).hexdigest() != spec.sha256:
        raise BundleError(
            f"{path} is not the graph that its manifest describes: it was damaged or exchanged. "
            "Export the bundle again."
        )
    return content


def weight_bytes(graph: bytes, manifest: Manifest, folder: Path) -> int:
    """Bytes of the weights that a graph keeps in the checkpoint's files in `folder`, in the dtype that it computes in.

    Raises:
        BundleError: a weight lies elsewhere, or is cut off.
    """
    model = onnx.load_model_from_string(graph)
    total = 0
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_type not in BYTES_OF:
            raise BundleError(f"The weight {plain(tensor.name)} has no dtype of weights. Export the bundle again.")
        elements = math.prod(tensor.dims)
        _check(tensor.name, where, elements * BYTES_OF[tensor.data_type], manifest.checkpoint.files, folder)
        total += elements * (4 if manifest.dtype == "float32" else BYTES_OF[tensor.data_type])
    return total


def check_axes(model: onnx.ModelProto) -> None:
    """Raise a BundleError for a reduction that computes its axes: no TensorRT takes one, and bundles of earlier
    releases have some (`export/graphs/plain_nodes.py` settles them)."""
    constants = {t.name for t in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    for node in model.graph.node:
        axes = node.input[1] if node.op_type.startswith("Reduce") and len(node.input) > 1 else ""
        if axes and axes not in constants:
            raise BundleError(
                f"The node {plain(node.name)} ({node.op_type}) computes the axes that it reduces, which TensorRT does "
                "not take: the bundle is of an earlier release. Export the bundle again."
            )


def _check(name: str, where: dict[str, str], length: int, files: Iterable[str], folder: Path) -> None:
    location = where.get("location", "")
    if location not in files:
        raise BundleError(f"The weight {plain(name)} lies in {plain(location)!r}, which is no file of the checkpoint. "
                          "Export the bundle again.")  # fmt: skip
    try:
        offset, size = int(where["offset"]), os.stat(folder / location).st_size
        fits = int(where["length"]) == length and 0 <= offset <= size - length
    except (KeyError, ValueError):
        fits = False
    except OSError as cause:
        raise BundleError(
            f"{folder / location} cannot be read ({cause.strerror}). "
            "Say where the checkpoint is with --checkpoint FOLDER."
        ) from None
    if not fits:
        raise BundleError(f"The weight {plain(name)} does not fit into {folder / location}. Export the bundle again.")
