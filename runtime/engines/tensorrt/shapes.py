"""Which profile a step is run with, and how large its inputs and outputs can be.

A step is a decode step when no sequence has more than W tokens (the graphs commit by that rule too, so a long step must
not run with a decode plan, nor a short one with a prefill plan), and a prefill step otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from flashnext.builder.engine_manifest import EngineGraph, Profile
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import GraphSpec, TensorSpec
from flashnext.runtime.engines.base import numpy_dtype

Sizes = Mapping[str, int]
MEANINGS = {"B": "sequences", "S": "tokens each", "N": "rows of logits"}


def choose(spec: GraphSpec, graph: EngineGraph, window: int, sizes: Sizes) -> Profile:
    """The profile for a step of these sizes ("B", "S", "N").

    Raises:
        EngineError: there is none.
    """
    kind = "decode" if sizes.get("S", 1) <= window else "prefill"
    fitting = (p for p in graph.profiles if p.name == kind and not any(outside(spec, p, sizes)))
    if profile := next(fitting, None):
        return profile
    have = " or ".join(_described(spec, p) for p in graph.profiles if p.name == kind) or "none at all"
    asked = ", ".join(f"{sizes[d]} {what}" for d, what in MEANINGS.items() if d in sizes)
    raise EngineError(
        f"The engine of {spec.file} has no {kind} profile for a step of {asked}; it takes {have}. "
        "Run fewer sequences or shorter chunks at once, or build the engine for more: flashnext build --help."
    )


def outside(spec: GraphSpec, profile: Profile, sizes: Sizes) -> Iterator[str]:
    """The dimensions for which a step's size lies outside the profile."""
    for name, (low, high) in limits(spec, profile).items():
        if name in sizes and not low <= sizes[name] <= high:
            yield name


def limits(spec: GraphSpec, profile: Profile) -> dict[str, tuple[int, int]]:
    """The smallest and the largest size of each dimension with a name."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in spec.inputs:
        if tensor.name in profile.ranges:
            r = profile.ranges[tensor.name]
            for dimension, low, high in zip(tensor.shape, r.min, r.max, strict=False):
                if isinstance(dimension, str):
                    known = found.get(dimension, (low, high))
                    found[dimension] = max(low, known[0]), min(high, known[1])
    return found


def plan_form(tensor: TensorSpec, codes: Mapping[str, str]) -> tuple[str, tuple[int | str, ...]]:
    """dtype and shape that a plan has for a tensor, the same bytes as the bundle's graph: 8-bit codes may have another
    dtype there, or stand in words of four ("int32")."""
    dtype = codes.get(tensor.name, tensor.dtype)
    factor = numpy_dtype(dtype).itemsize // numpy_dtype(tensor.dtype).itemsize
    if factor == 1:
        return dtype, tensor.shape
    *axes, columns = tensor.shape
    return dtype, (*axes, columns if isinstance(columns, str) else columns // factor)


def most_bytes(tensor: TensorSpec, spec: GraphSpec, graph: EngineGraph, kind: str = "") -> int:
    """Bytes of an input or output at the largest sizes of any profile, or of those for one kind of step."""
    most = 0
    for profile in (p for p in graph.profiles if kind in ("", p.name)):
        sizes = {name: high for name, (_, high) in limits(spec, profile).items()}
        most = max(most, math.prod(sizes[d] if isinstance(d, str) else d for d in tensor.shape))
    return most * numpy_dtype(tensor.dtype).itemsize


def _described(spec: GraphSpec, profile: Profile) -> str:
    found = limits(spec, profile)
    return ", ".join(f"{found[d][0]} to {found[d][1]} {what}" for d, what in MEANINGS.items() if d in found)
