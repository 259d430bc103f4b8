"""Faults put into copies of a bundle, of its graphs or of its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from flashnext.export.checkpoint.identity import identity
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.manifest import Manifest

Change = Callable[[NDArray[Any]], None]
"""Changes an array in place."""


def one_weight(array: NDArray[Any]) -> None:
    """The element in the middle is a little more: a tenth of what a weight is on average."""
    flat = array.reshape(-1)
    flat[len(flat) // 2] += 1 / 64


def tenth_more(array: NDArray[Any]) -> None:
    """Everything is a tenth larger (norm weights are stored as the distance from one)."""
    array[...] = (1 + array.astype(np.float32)) * 1.1 - 1


def doubled(array: NDArray[Any]) -> None:
    """A scale that is twice what it should be."""
    array *= 2


def changed_checkpoint(bundle: Path, folder: Path, tensor: str, change: Change) -> Path:
    """A copy of a bundle on a copy of its checkpoint in which one tensor is changed."""
    manifest = Manifest.read(bundle)
    weights, copy = folder / "checkpoint", folder / "bundle"
    shutil.copytree(manifest.checkpoint.path, weights)
    shutil.copytree(bundle, copy)
    array = Checkpoint.open(weights).tensors[tensor]
    dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}[array.dtype]
    mapped = np.memmap(array.file, dtype, "r+", array.offset, array.shape)
    change(mapped)
    mapped.flush()
    moved = dataclasses.replace(
        manifest.checkpoint, path=str(weights), identity=identity(weights), common_parent=str(weights)
    )
    dataclasses.replace(manifest, checkpoint=moved).write(copy)
    return copy


def changed_graph(bundle: Path, copy: Path, graph: str, edit: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of a bundle in which one graph is edited, and its hash with it."""
    shutil.copytree(bundle, copy)
    manifest = Manifest.read(copy)
    spec = manifest.graphs[graph]
    model = onnx.load(copy / spec.file, load_external_data=False)
    edit(model)
    onnx.save(model, copy / spec.file)
    digest = hashlib.sha256((copy / spec.file).read_bytes()).hexdigest()
    graphs = {**manifest.graphs, graph: dataclasses.replace(spec, sha256=digest)}
    dataclasses.replace(manifest, graphs=graphs).write(copy)
    return copy


def exchanged_weights(first: str, second: str) -> Callable[[onnx.ModelProto], None]:
    """An edit: two initializers point to each other's bytes."""

    def edit(model: onnx.ModelProto) -> None:
        a, b = (next(t for t in model.graph.initializer if t.name == name) for name in (first, second))
        entries = [list(a.external_data), list(b.external_data)]
        for tensor, found in zip((b, a), entries, strict=True):
            del tensor.external_data[:]
            tensor.external_data.extend(found)

    return edit
