"""A sequence in the pool: its tokens, its slot, and how much of it the states hold.

The rules of a step's lengths (design: no rollback code) live in one place, here: what a step may assume about its
slot, and what it leaves behind for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from flashnext.runtime.model_runner import Ints, StepBatch
from flashnext.runtime.ngram import Upcoming
from flashnext.runtime.speculation.draft import Draft


@dataclass(eq=False)
class Sequence:
    """Prompt and output tokens, and where they are.

    `past` tokens have been run and kept; the last `pending` of them wait in the window of the slot's states until
    the next step commits them. `tokens[past:]` are still to be run, and `drafts` are guesses of what follows them.
    """

    tokens: list[int]
    prompt_length: int = field(init=False)
    slot: int | None = None
    past: int = 0
    pending: int = 0
    finished: bool = False
    drafts: list[Draft] = field(default_factory=list)
    fed: int = 0
    """Positions that the draft layer has seen with their true states."""
    drafted: bool = False
    """Whether the draft layer guesses for it, and so has to have seen all that was run."""
    cached: int = 0
    """Tokens whose states came from the prefix cache."""

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
        """Record a step of `width` token columns that ran `length` tokens, all of them kept, and perhaps drafts.

        A step wider than the window commits at once; a narrower one leaves its tokens pending.
        """
        self.past += length
        self.pending = length if width <= window else 0
        self.drafts = []

    def leave_last_to_run(self) -> None:
        """At the end of a text: count its last token as not run, if it was run as a draft.

        The draft layer takes a place with the token after it, so it can only keep up with a text that has one more.
        """
        if not self.waiting_tokens:
            self.past -= 1
            self.pending -= 1

    def keep(self, token: int, drafted: bool) -> None:
        """Append a token of the text. One that the last step ran as a draft has been run already."""
        self.tokens.append(token)
        if drafted:
            self.past += 1
            self.pending += 1


@dataclass(frozen=True)
class Row:
    """One sequence's part in a step: its next `length` tokens, and drafts of those behind them."""

    sequence: Sequence
    length: int
    drafts: tuple[Draft, ...] = ()

    @property
    def columns(self) -> int:
        """Tokens that the row runs."""
        return self.length + len(self.drafts)

    @property
    def logits(self) -> int:
        """Places whose next token is asked for: the last token and each draft."""
        return 1 + len(self.drafts)


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt, `length` from place `start`."""

    sequence: Sequence
    start: int
    length: int

    def upcoming(self, ngram_context: int, eos: int) -> Upcoming:
        """What its n-gram rows depend on."""
        tokens = self.sequence.tokens
        return Upcoming(
            token_ids=np.array([tokens[self.start : self.start + self.length]], np.int32),
            context=np.array([context(tokens, self.start, ngram_context, eos)], np.int64),
            new_len=np.array([self.length], np.int32),
        )


@dataclass(frozen=True)
class Step:
    """A planned step: `width` token columns (S), one row per sequence."""

    rows: tuple[Row, ...]
    width: int
    chunk: Chunk | None = None
    """A chunk of a prompt that a later step will run."""

    def batch(self, ngram_context: int, eos: int, all_logits: bool = False) -> StepBatch:
        """The step's arrays; logits are wanted for each row's last token and drafts, or for all tokens."""
        rows, width = self.rows, self.width
        columns = np.array([row.length + len(row.drafts) for row in rows], np.int32)
        wanted = columns if all_logits else np.array([row.logits for row in rows], np.int32)
        lengths = np.array([(r.sequence.slot, r.sequence.past, r.sequence.pending) for r in rows], np.int32).T
        slots, past, pending = np.ascontiguousarray(lengths)
        return StepBatch(
            token_ids=np.array([_padded(row, width) for row in rows], np.int32),
            slots=slots,
            past_len=past,
            accepted=pending,
            new_len=columns,
            context=np.array([context(r.sequence.tokens, r.sequence.past, ngram_context, eos) for r in rows], np.int64),
            logit_rows=_logit_rows(columns, wanted, width),
        )


def _padded(row: Row, width: int) -> list[int]:
    start = row.sequence.past
    known = row.sequence.tokens[start : start + row.length]
    if len(known) == width:
        return known
    return known + [draft.token for draft in row.drafts] + [0] * (width - row.columns)


def _logit_rows(columns: Ints, wanted: Ints, width: int) -> Ints:
    """Of each row the last `wanted` places, as row * width + column."""
    ends = np.arange(len(columns), dtype=np.int32) * width + columns
    if wanted.max() == 1:
        return ends - 1
    return np.concatenate([np.arange(end - n, end, dtype=np.int32) for end, n in zip(ends, wanted, strict=True)])


def context(tokens: Items[int], past: int, length: int, eos: int) -> list[int]:
    """The `length` tokens before place `past`, eos where the text had not begun."""
    before = list(tokens[max(past - length, 0) : past])
    return [eos] * (length - len(before)) + before
