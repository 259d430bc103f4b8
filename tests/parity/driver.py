"""Feeds texts to a `ModelRunner` step by step, keeping for each slot what the test says its text is.

The driver is the scheduler's part of the contract and no more: it counts `past_len`, says how many tokens of a slot's
previous step were kept, and takes the n-gram context from the kept text. Padding is made of arbitrary tokens, so that
anything that reads it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashnext.runtime.model_runner import ModelRunner, StepBatch

from .oracle import Array


@dataclass
class Sequences:
    """The texts of a runner's slots; `pending` are the last step's tokens, while nobody said how many are kept."""

    runner: ModelRunner
    texts: dict[int, list[int]] = field(default_factory=dict)
    pending: dict[int, list[int]] = field(default_factory=dict)
    hidden: dict[int, Array] = field(default_factory=dict)
    """Residual branches [T, n, H] of each slot's tokens in the last step."""

    def start(self, *slots: int) -> None:
        """New, empty sequences: nothing is told to the runner, `past_len = 0` has to be enough."""
        for slot in slots:
            self.texts[slot], self.pending[slot] = [], []

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        keep: Mapping[int, int] | None = None,
        *,
        width: int | None = None,
        padding_rows: int = 0,
    ) -> dict[int, Array]:
        """One step: new tokens of some slots, in the mapping's order; returns the logits [T, vocab] of each.

        `keep` says how many pending tokens of a slot are kept (all of them by default). `width` makes the step wider
        than its longest row, `padding_rows` adds rows without a sequence.
        """
        keep = keep or {}
        accepted = {slot: keep.get(slot, len(self.pending[slot])) for slot in tokens}
        for slot, count in accepted.items():
            if tokens[slot]:  # a row without new tokens reads and writes nothing: its pending tokens stay pending
                self.texts[slot] += self.pending[slot][:count]
                self.pending[slot] = []
        width = width or max((len(t) for t in tokens.values()), default=1)
        batch = self._batch(tokens, accepted, max(width, 1), padding_rows)
        out = self.runner.step(batch)
        logits, row = {}, 0
        for place, (slot, new) in enumerate(tokens.items()):
            logits[slot] = out.logits[row : row + len(new)]
            self.hidden[slot] = out.hidden[place, : len(new)]
            row += len(new)
            self._remember(slot, list(new), batch.token_ids.shape[1])
        return logits

    def _remember(self, slot: int, new: list[int], width: int) -> None:
        if not new:
            return
        if width > self.runner.manifest.window:
            self.texts[slot] += new
        else:
            self.pending[slot] = new

    def _batch(
        self, tokens: Mapping[int, Sequence[int]], accepted: Mapping[int, int], width: int, padding_rows: int
    ) -> StepBatch:
        config, slots = self.runner.manifest.config, list(tokens)
        rows = len(slots) + padding_rows
        filler = np.random.default_rng(rows * width)
        ids = filler.integers(0, config.vocab_size, (rows, width)).astype(np.int32)
        context = np.full((rows, config.ngram_size - 1), config.ngram_eos if config.eos_token_id else 0, np.int64)
        lengths = np.zeros((3, rows), np.int32)
        for row, slot in enumerate(slots):
            ids[row, : len(tokens[slot])] = tokens[slot]
            recent = self.texts[slot][-context.shape[1] :]
            context[row, context.shape[1] - len(recent) :] = recent
            lengths[:, row] = len(self.texts[slot]), accepted[slot], len(tokens[slot])
        wanted = [row * width + i for row, slot in enumerate(slots) for i in range(len(tokens[slot]))]
        nowhere = [self.runner.manifest.slots] * padding_rows
        return StepBatch(
            token_ids=ids,
            slots=np.array(slots + nowhere, np.int32),
            past_len=lengths[0],
            accepted=lengths[1],
            new_len=lengths[2],
            context=context,
            logit_rows=np.array(wanted, np.int32),
        )


def score(runner: ModelRunner, tokens: Sequence[int], slot: int = 0) -> Array:
    """Logits [T, vocab] of a text in one step."""
    sequences = Sequences(runner)
    sequences.start(slot)
    return sequences.step({slot: tokens})[slot]
