"""Ranges of the dynamic inputs for each kind of step: what a plan can be run with, and what it is made fast for.

B sequences, S tokens of each, N rows of logits. A decode step has at most W tokens a sequence (one, or drafts to be
verified) and is made fast for one sequence with one token. A prefill step has more, by default of one sequence: that is
how the runtime runs prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashnext.builder.engine_manifest import Range
from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import GraphSpec, Manifest

DEFAULT_CHUNK = 512
Sizes = Mapping[str, tuple[int, int, int]]
"""Smallest, usual and largest value of each dynamic dimension."""


@dataclass(frozen=True)
class ProfileOptions:
    """Sizes of steps: sequences of a decode step (0: every slot); tokens (0: 512, or the capacity where that is less)
    and sequences of a prefill step."""

    max_batch: int = 0
    prefill_chunk: int = 0
    prefill_batch: int = 1


def step_sizes(manifest: Manifest, options: ProfileOptions) -> dict[str, Sizes]:
    """The dynamic dimensions' values for "decode" and, where prompts can be longer than W, "prefill".

    Raises:
        BuildError: sizes beyond the bundle's slots or capacity.
    """
    batch = options.max_batch or manifest.slots
    chunk = options.prefill_chunk or min(DEFAULT_CHUNK, manifest.capacity)
    for option, value, limit, what in (
        ("--max-batch", batch, manifest.slots, "slots"),
        ("--prefill-batch", options.prefill_batch, manifest.slots, "slots"),
        ("--prefill-chunk", chunk, manifest.capacity, "tokens of capacity"),
    ):
        if not 1 <= value <= limit:
            raise BuildError(
                f"{option} {value} is not from 1 to the bundle's {limit} {what}. Choose another, or export the bundle "
                f"again with more (--{'capacity' if 'capacity' in what else 'slots'})."
            )
    window, rows = min(manifest.window, manifest.capacity), options.prefill_batch
    sizes: dict[str, Sizes] = {
        "decode": {"B": (1, 1, batch), "S": (1, 1, window), "N": (1, 1, batch * window)},
    }
    if chunk > window:
        tokens = (window + 1, chunk, chunk)
        sizes["prefill"] = {"B": (1, 1, rows), "S": tokens, "N": (1, 1, rows * chunk)}
    return sizes


def ranges(spec: GraphSpec, sizes: Sizes) -> dict[str, Range]:
    """The range of every input of a graph that has a dynamic dimension."""
    return {
        t.name: Range(*(tuple(d if isinstance(d, int) else sizes[d][i] for d in t.shape) for i in range(3)))
        for t in spec.inputs
        if any(isinstance(d, str) for d in t.shape)
    }
