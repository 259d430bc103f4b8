"""A sequence in the pool: its tokens, its slot, and how much of it the states hold.

The rules of a step's lengths (design: no rollback code) live in one place, here: what a step may assume about its
slot, and what it leaves behind for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from flashnext.runtime.model_runner import Ints, StepBatch


@dataclass(eq=False)
class Sequence:
    """Prompt and output tokens, and where they are.

    `past` tokens have been run and kept; the last `pending` of them wait in the window of the slot's states until
    the next step commits them. `tokens[past:]` are still to be run.
    """

    tokens: list[int]
    prompt_length: int = field(init=False)
    slot: int | None = None
    past: int = 0
    pending: int = 0
    finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that have not been run."""
        return len(self.tokens) - self.past

    @property
    def output_length(self) -> int:
        """Tokens that were sampled."""
        return len(self.tokens) - self.prompt_length

    def ran(self, length: int, width: int, window: int) -> None:
        """Record a step of `width` token columns that ran `length` tokens, all of them kept.

        A step wider than the window commits at once; a narrower one leaves its tokens pending.
        """
        self.past += length
        self.pending = length if width <= window else 0


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step: its next `length` tokens."""

    sequence: Sequence
    length: int


@dataclass(frozen=True)
class Step:
    """A planned step: `width` token columns (S), one row per sequence."""

    rows: tuple[Row, ...]
    width: int

    def batch(self, ngram_context: int, eos: int, all_logits: bool = False) -> StepBatch:
        """The step's arrays; logits are wanted for each row's last token, or for all tokens."""
        sequences = [row.sequence for row in self.rows]
        lengths = np.array([row.length for row in self.rows], np.int32)
        return StepBatch(
            token_ids=np.array([_padded(row, self.width) for row in self.rows], np.int32),
            slots=np.array([s.slot for s in sequences], np.int32),
            past_len=np.array([s.past for s in sequences], np.int32),
            accepted=np.array([s.pending for s in sequences], np.int32),
            new_len=lengths,
            context=np.array([context(s.tokens, s.past, ngram_context, eos) for s in sequences], np.int64),
            logit_rows=_logit_rows(lengths, self.width, all_logits),
        )


def _padded(row: Row, width: int) -> list[int]:
    start = row.sequence.past
    return row.sequence.tokens[start : start + row.length] + [0] * (width - row.length)


def _logit_rows(lengths: Ints, width: int, all_logits: bool) -> Ints:
    starts = np.arange(len(lengths), dtype=np.int32) * width
    if not all_logits:
        return starts + lengths - 1
    return np.concatenate([start + np.arange(n, dtype=np.int32) for start, n in zip(starts, lengths, strict=True)])


def context(tokens: Items[int], past: int, length: int, eos: int) -> list[int]:
    """The `length` tokens before place `past`, eos where the text had not begun."""
    before = list(tokens[max(past - length, 0) : past])
    return [eos] * (length - len(before)) + before
