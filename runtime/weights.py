"""Weights that are graph inputs: bound once from the checkpoint, mapped instead of copied where the bytes allow it.

A weight stored as one tensor in the graph's own dtype is a reshaped view of the memory-mapped file. Any other is
made once: converted to the graph's dtype, or assembled from per-expert tensors. All of these are read together, in
the order in which they lie in the files (`runtime.reading`); the memory for it is the weights themselves and a few
buffers, because every part is read straight into its place; where memory is scarce, the page cache forgets what has
been read, so that the n-gram table stays in it. Scales are checked once they are there: a wrong one would
make fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export import number_formats
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES, TensorInfo
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.export.progress import byte_bar
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.ngram_memory import cache_has_room
from flashnext.runtime.reading import Piece, read_into_place

EXPERT = "{e}"


def load_weights(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Array]:
    """Every weight of the manifest by graph input name.

    Raises:
        CheckpointError: a source tensor is missing, has another number of elements, or cannot be read.
    """
    weights: dict[str, Array] = {}
    pieces: list[Piece] = []
    for spec in manifest.weights:
        weights[spec.name], needed = _place(spec, checkpoint)
        pieces += needed
    read = sum(p.nbytes for p in pieces)
    _read(pieces, cache_has_room(checkpoint, read, sum(p.target.nbytes for p in pieces)))
    for spec in manifest.weights:
        check_scales(spec, weights[spec.name])
    return weights


def load_weight(spec: WeightSpec, checkpoint: Checkpoint) -> Array:
    """One weight: a view of the mapped file, or an array made once."""
    weight, pieces = _place(spec, checkpoint)
    _read(pieces)
    check_scales(spec, weight)
    return weight


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor as it lies in a weight: `size` elements from `begin` on, stored as `dtype`."""

    name: str
    file: Path
    offset: int
    dtype: np.dtype[Any]
    begin: int
    size: int


def sources(spec: WeightSpec, checkpoint: Checkpoint) -> list[Source]:
    """What a weight is made of, in the order of its elements.

    Raises:
        CheckpointError: a source tensor is missing or has another number of elements.
    """
    names = _names(spec)
    if not names or math.prod(spec.shape) % len(names):
        raise CheckpointError(f"{spec.name} {list(spec.shape)} cannot be made of {len(names)} tensors of equal size.")
    each, dtype = math.prod(spec.shape) // len(names), numpy_dtype(spec.dtype)
    for name in names:
        _check(spec, name, each, checkpoint)
    infos = [checkpoint.tensors[name] for name in names]
    return [
        Source(name, info.file, info.offset, _stored_dtype(info, dtype), number * each, each)
        for number, (name, info) in enumerate(zip(names, infos, strict=True))
    ]


def _place(spec: WeightSpec, checkpoint: Checkpoint) -> tuple[Array, list[Piece]]:
    """A weight's array and what has still to be read into it."""
    found, dtype = sources(spec, checkpoint), numpy_dtype(spec.dtype)  # checked before memory is taken
    if len(found) == 1 and found[0].dtype == dtype:
        return checkpoint.array(found[0].name).view(dtype).reshape(spec.shape), []
    weight = np.empty(spec.shape, dtype)
    parts = weight.reshape(len(found), -1)
    return weight, [Piece(s.file, s.offset, s.dtype, part) for s, part in zip(found, parts, strict=True)]


def _stored_dtype(info: TensorInfo, wanted: np.dtype[Any]) -> np.dtype[Any]:
    """How a tensor's bytes are to be taken: where the graph wants bytes, 8-bit codes are bytes and not numbers."""
    stored = NUMPY_DTYPES[info.dtype]
    return wanted if wanted == np.uint8 and stored.itemsize == 1 else stored


def _names(spec: WeightSpec) -> list[str]:
    """Checkpoint tensors in the order in which they lie in the weight: for each expert, each source."""
    if not any(EXPERT in source for source in spec.sources):
        return list(spec.sources)
    return [source.replace(EXPERT, str(e)) for e in range(spec.shape[0]) for source in spec.sources]


def _check(spec: WeightSpec, name: str, size: int, checkpoint: Checkpoint) -> None:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"The checkpoint lacks {name}, from which {spec.name} is made. Export the bundle again.")
    shape = checkpoint.tensors[name].shape
    if math.prod(shape) != size:
        raise CheckpointError(
            f"{name} has shape {list(shape)}, which does not hold the {size:,} elements of {spec.name} "
            f"{list(spec.shape)}. Export the bundle again."
        )


def check_scales(spec: WeightSpec, scales: Array, begin: int = 0) -> None:
    """Every scale is a finite number above zero; the E4M3 codes of such are 0x01 to 0x7E.

    Args:
        spec: the weight; one that is no scale passes.
        scales: values of the weight, from its element `begin` on.

    Raises:
        CheckpointError: one is not.
    """
    if not spec.is_scale:
        return
    is_code = spec.dtype == "uint8"
    low, high = (1, 0x7E) if is_code else (np.finfo(np.float32).tiny, np.finfo(np.float32).max)
    good = (scales >= low) & (scales <= high)
    if good.all():
        return
    bad = int(np.argmin(good))
    value = number_formats.E4M3[scales.flat[bad]] if is_code else scales.flat[bad]
    names = _names(spec)
    raise CheckpointError(
        f"{names[(begin + bad) * len(names) // math.prod(spec.shape)]} holds the scale {value}; scales have to be "
        "finite numbers above zero. Download the checkpoint again, or convert it again."
    )


def _read(pieces: Iterable[Piece], keep_cached: bool = True) -> None:
    pieces = list(pieces)
    with byte_bar(sum(p.nbytes for p in pieces), "reading weights") as bar:
        read_into_place(pieces, bar.update, keep_cached=keep_cached)
