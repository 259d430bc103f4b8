"""Weights that are graph inputs: bound once from the checkpoint, mapped instead of copied where the bytes allow it.

A weight stored as one tensor in the graph's own dtype is a reshaped view of the memory-mapped file. Any other is
made once: converted to the graph's dtype, or assembled from per-expert tensors. The memory for that is the weight
itself and nothing more, because every part is converted straight into its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.export.progress import progress_bar
from flashnext.runtime.engines.base import Array, numpy_dtype

EXPERT = "{e}"


def load_weights(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Array]:
    """Every weight of the manifest by graph input name.

    Raises:
        CheckpointError: a source tensor is missing or has another number of elements.
    """
    return {spec.name: load_weight(spec, checkpoint) for spec in _with_progress(manifest.weights)}


def load_weight(spec: WeightSpec, checkpoint: Checkpoint) -> Array:
    """One weight: a view of the mapped file, or an array made once."""
    if any(EXPERT in source for source in spec.sources):
        return _assemble(spec, checkpoint)
    if len(spec.sources) != 1:
        raise CheckpointError(f"{spec.name} needs one source tensor, its manifest lists {len(spec.sources)}.")
    source = _source(checkpoint, spec.sources[0], spec.shape, spec.name)
    dtype = numpy_dtype(spec.dtype)
    if source.dtype == dtype:
        return source
    out = np.empty(spec.shape, dtype)
    np.copyto(out, source, casting="unsafe")
    return out


def _assemble(spec: WeightSpec, checkpoint: Checkpoint) -> Array:
    """Stack per-expert tensors: [E, sources, …], or [E, …] for a single source."""
    out = np.empty(spec.shape, numpy_dtype(spec.dtype))
    parts = out if len(spec.sources) > 1 else out[:, None]
    for expert in range(spec.shape[0]):
        for part, source in enumerate(spec.sources):
            name = source.replace(EXPERT, str(expert))
            np.copyto(parts[expert, part], _source(checkpoint, name, parts.shape[2:], spec.name), casting="unsafe")
    return out


def _source(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], weight: str) -> Array:
    if name not in checkpoint.tensors:
        raise CheckpointError(f"The checkpoint lacks {name}, from which {weight} is made. Export the bundle again.")
    array = checkpoint.array(name)
    if array.size != math.prod(shape):
        raise CheckpointError(
            f"{name} has shape {list(array.shape)}, which does not hold {list(shape)} of {weight}. "
            "Export the bundle again."
        )
    return array.reshape(shape)


def _with_progress(weights: Sequence[WeightSpec]) -> Iterator[WeightSpec]:
    with progress_bar(len(weights), "weights") as bar:
        for weight in weights:
            yield weight
            bar.update()
