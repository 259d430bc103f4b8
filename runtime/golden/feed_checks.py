"""Whether saved steps and inputs keep to a bundle's bounds: engines read and write where they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.base import Array
from flashnext.runtime.validation.steps import Step

LENGTHS = ("past_len", "accepted", "new_len")


def check_step(step: Step, manifest: Manifest) -> None:
    """Lengths that a slot can hold.

    Raises:
        ValueError: others.
    """
    rows = len(step.new_len)
    if not 1 <= rows <= manifest.slots or {len(step.past_len), len(step.accepted)} != {rows}:
        raise ValueError(f"step {step.name} with {rows} rows")
    if not 1 <= step.tokens <= manifest.capacity:
        raise ValueError(f"step {step.name} with {step.tokens} tokens")
    ends = [past + new for past, new in zip(step.past_len, step.new_len, strict=True)]
    if (
        min(step.past_len + step.accepted + step.new_len) < 0
        or max(ends) > manifest.capacity
        or max(step.new_len) > step.tokens
        or max(step.accepted) > manifest.window
    ):
        raise ValueError(f"step {step.name} with lengths that no slot holds")


def feed_faults(feed: Mapping[str, Array], step: Step, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the inputs of a step."""
    bounds = {
        "token_ids": (0, manifest.config.vocab_size - 1),
        "slots": (0, manifest.slots - 1),
        "logit_rows": (0, len(step.new_len) * step.tokens - 1),
        "blocks": (-1, manifest.capacity // manifest.config.indexer_compress_ratio),
        "blocks_len": (0, manifest.capacity),
    }
    for name, (low, high) in bounds.items():
        if name in feed and feed[name].size and not (low <= feed[name].min() and feed[name].max() <= high):
            yield f"{name} outside {low} … {high}"
    if len(np.unique(feed["slots"])) != len(feed["slots"]):
        yield "slots that are not distinct"
    yield from (
        f"{n} that differs from the step's" for n in LENGTHS if n in feed and feed[n].tolist() != list(getattr(step, n))
    )
