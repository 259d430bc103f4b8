"""What a generation gives back: the finished output, the pieces of a stream, log probabilities and timings."""

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
class RequestOutput:
    """One finished request.

    `token_ids` hold everything that was sampled, the stop token included; `text` ends before the stop token or stop
    string. `finish_reason` is "stop" (stop token or string) or "length" (max_tokens). `logprobs` has one entry per
    token: token id to log probability, the sampled token always among them.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None
    timings: Timings


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
