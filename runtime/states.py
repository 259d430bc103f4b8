"""State arrays: the memory of all slots, owned by the runtime and bound to the engines in place.

A state's first axis is the slot; the extra last row takes what padding rows would write. The arrays start as zeros,
though no graph relies on it: `past_len = 0` means that every state reads as zero, whatever the memory holds.
"""

from __future__ import annotations

import math

import numpy as np

from flashnext.export.errors import BundleError
from flashnext.export.graphs.manifest import Manifest, TensorSpec
from flashnext.runtime.engines.base import Array, numpy_dtype


def state_specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """The states of all graphs by name; graphs that share a name (mtp, mtp_draft) share the memory.

    Raises:
        BundleError: two graphs disagree about a state, or its first axis is not `slots + 1`.
    """
    found: dict[str, TensorSpec] = {}
    for graph in manifest.graphs.values():
        for spec in graph.inputs:
            if spec.role == "state":
                _check(spec, found.setdefault(spec.name, spec), manifest)
    return found


def _check(spec: TensorSpec, first: TensorSpec, manifest: Manifest) -> None:
    if (spec.dtype, spec.shape) != (first.dtype, first.shape):
        raise BundleError(
            f"Two graphs of the bundle disagree about the state {spec.name}: {first.dtype} {list(first.shape)} and "
            f"{spec.dtype} {list(spec.shape)}. Export the bundle again."
        )
    if not all(isinstance(d, int) for d in spec.shape) or not spec.shape or spec.shape[0] != manifest.slots + 1:
        raise BundleError(
            f"The state {spec.name} has shape {list(spec.shape)}; its first axis must be {manifest.slots} slots + 1. "
            "Export the bundle again."
        )


def allocate_states(manifest: Manifest) -> dict[str, Array]:
    """Zeroed arrays for every state. The pages are touched only when a slot is used (the system zeroes lazily)."""
    return {name: np.zeros(_sizes(spec), numpy_dtype(spec.dtype)) for name, spec in state_specs(manifest).items()}


def bytes_per_slot(manifest: Manifest) -> int:
    """Memory that one sequence may take, over all states."""
    return sum(
        math.prod(_sizes(spec)[1:]) * numpy_dtype(spec.dtype).itemsize for spec in state_specs(manifest).values()
    )


def _sizes(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(int(d) for d in spec.shape)
