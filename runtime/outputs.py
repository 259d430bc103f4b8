"""What a generation gives back: the finished output, the pieces of a stream, log probabilities, timings, drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log probability of a token in the raw distribution and its rank (1 is the most likely)."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class Timings:
    """Seconds since the request was made, on the monotonic clock."""

    admitted: float
    """It got a slot."""
    first_token: float
    finished: float
    tokens: int

    @property
    def seconds_per_token(self) -> float:
        """Mean time of the tokens after the first; 0 with less than two."""
        return (self.finished - self.first_token) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True)
class DraftCounts:
    """What speculation did for one request: drafts verified, drafts kept, and the steps that verified them."""

    proposed: int = 0
    kept: int = 0
    steps: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: the kept drafts and the one that every step gives; 1 without speculation."""
        return 1 + self.kept / self.steps if self.steps else 1.0


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

    `token_ids` hold everything that was sampled, the stop token included; `text` ends before the stop token or stop
    string. `finish_reason` is "stop" (stop token or string), "length" (max_tokens) or
    "deadline" (max_seconds). `logprobs` has one entry per
    token: token id to log probability, the sampled token always among them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None
    timings: Timings
    drafts: DraftCounts = DraftCounts()
    cached_tokens: int = 0
    """Tokens of the prompt that were not run, because their states were known."""


@dataclass(frozen=True)
class Piece:
    """What a stream yields: text that is final, and the tokens sampled since the last piece.

    Text lags behind the tokens while a character is incomplete or a stop string may be forming. The last piece has
    the `finish_reason`. `str(piece)` is its text.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None

    def __str__(self) -> str:
        return self.text
