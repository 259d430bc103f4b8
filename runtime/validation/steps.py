"""Seeded steps that a validation feeds to every graph: a prefill chunk, a decode step, a verification, what follows.

The rows are ragged, their slots out of order, and the step after the verification keeps only some of its tokens, so
padding, slots and the pending window all matter to the outputs. Token ids are random: a graph must be right on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.engines.engine_set import StepLimits
from flashnext.runtime.hand_over import HandOver

DEFAULT_PREFILL = 24
VERIFIED = 4
STEPS_AFTER_PREFILL = 2 + VERIFIED
ROWS_SCALE = 0.5
"""Standard deviation of the random n-gram rows: large enough that the injection shows in the outputs."""


@dataclass(frozen=True)
class Step:
    """One step's lengths; `tokens` S, and per row what was committed, kept of the last step, and is new."""

    name: str
    tokens: int
    past_len: tuple[int, ...]
    accepted: tuple[int, ...]
    new_len: tuple[int, ...]
    slots: tuple[int, ...] = ()
    """Of the rows; the first ones in reverse order when empty."""

    @property
    def valid(self) -> NDArray[np.bool_]:
        """[B, S]: which positions hold tokens."""
        return np.arange(self.tokens) < np.array(self.new_len)[:, None]


def plan(manifest: Manifest, prefill: int = 0, ragged: bool = True, limits: StepLimits | None = None) -> list[Step]:
    """The steps for a bundle; `prefill` 0 means a chunk just long enough to be committed at once.

    Without `ragged` every row is full, so that no step writes what must go nowhere into a state's last row. For an
    engine with `limits` to its steps, prompts may have to come one by one.

    Raises:
        RequestError: a chunk that the bundle's slots cannot hold.
    """
    room = min(manifest.capacity - STEPS_AFTER_PREFILL, limits.tokens if limits else manifest.capacity)
    length = prefill or max(min(DEFAULT_PREFILL, room), manifest.window + 1)
    if not manifest.window < length <= room:
        raise RequestError(
            f"A prefill of {length} tokens does not fit: it has to be longer than the window ({manifest.window}) and "
            f"leave {STEPS_AFTER_PREFILL} of {manifest.capacity} tokens free, and the engines have to take it. Choose "
            f"--tokens from {manifest.window + 1} to {room}, or export with a larger --capacity."
        )
    rows = min(2, manifest.slots, limits.sequences if limits else 2)
    first = (length, length - length // 4 if ragged else length)[:rows]
    verified = min(VERIFIED, manifest.window)
    kept = (min(2, verified), verified)[:rows]
    none, one = (0,) * rows, (1,) * rows
    prompts = [Step("prefill", length, none, none, first)]
    if limits and limits.prompts < rows:
        names = ("prefill", "prefill of another")
        prompts = [Step(names[i], length, (0,), (0,), (first[i],), (rows - 1 - i,)) for i in range(rows)]
    return [
        *prompts,
        Step("decode", 1, first, none, one),
        Step("verify", verified, _add(first, one), one, (verified,) * rows),
        Step("after verify", 1, _add(first, one, kept), kept, one),
    ]


def draft_step(last: Step) -> Step:
    """The step of the graph "mtp_draft": one position after the last step of "mtp"."""
    rows = len(last.new_len)
    return Step("draft", 1, _add(last.past_len, last.new_len), (0,) * rows, (1,) * rows)


def draft_inputs(manifest: Manifest, known: Mapping[str, Array]) -> dict[str, Array]:
    """What a draft takes from the last step of "mtp", which has one token per row."""
    hand_over = HandOver(manifest)
    return {**hand_over.fed(hand_over.packed("hidden_out", known)), "blocks": known["blocks"]}


def _add(*lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*lengths, strict=True)))


class FeedMaker:
    """Makes the inputs of one graph; `known` gives what other graphs said for the same step."""

    def __init__(self, manifest: Manifest, seed: int) -> None:
        self.manifest = manifest
        self._seed = seed
        self._hand_over = HandOver(manifest)

    def feeds(self, graph: GraphSpec, number: int, step: Step, known: Mapping[str, Array]) -> dict[str, Array]:
        """Every input of the graph that is neither weight nor state."""
        values = {**self._values(number, step), **known}
        if "hidden" in values:  # static scales are not among the body's outputs
            values |= self._hand_over.fed(self._hand_over.packed("hidden", values))
        fed = [spec for spec in graph.inputs if spec.role in ("step", "rows", "edge")]
        return {spec.name: np.ascontiguousarray(values[spec.name], numpy_dtype(spec.dtype)) for spec in fed}

    def _values(self, number: int, step: Step) -> dict[str, Any]:
        random = np.random.default_rng([self._seed, number])
        config, rows = self.manifest.config, len(step.new_len)
        shape = (rows, step.tokens)
        values: dict[str, Any] = {
            "token_ids": random.integers(0, config.vocab_size, shape),
            "slots": step.slots or np.arange(rows)[::-1],
            "past_len": step.past_len,
            "accepted": step.accepted,
            "new_len": step.new_len,
            "blocks_len": step.past_len,
            "logit_rows": np.flatnonzero(step.valid),
        }
        for ngram in self.manifest.ngrams:
            rows_of_step = random.standard_normal((*shape, config.ple_embed_dim)) * ROWS_SCALE
            values[ngram.input] = rows_of_step * step.valid[..., None]
        return values
