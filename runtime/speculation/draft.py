"""What drafters and the decode loop say to each other.

A drafter is told after every step what was kept of it, and leaves its guesses in the sequences. The next step runs
them behind the last token, and the sampler decides, place by place, whether they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.engines.base import Array

if TYPE_CHECKING:
    from flashnext.runtime.request import Request

DRAFTERS = ("mtp", "mtp-sampled", "prompt-lookup")
"""The draft layer's likeliest tokens; tokens drawn from its distribution; what followed the same words before."""


@dataclass(frozen=True)
class Draft:
    """A guessed token; one that was drawn comes with the distribution it was drawn from.

    `tokens` [K] ascending and `weights` [K], which sum to 1, hold the tokens that could have been drawn.
    """

    token: int
    tokens: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Progress:
    """What one step did for one request: it ran positions from `start`, and `hidden` [kept, n, H] are those kept."""

    request: Request
    start: int
    hidden: Array

    @property
    def kept(self) -> int:
        return len(self.hidden)


class Drafter(Protocol):
    """Makes drafts."""

    def propose(self, rows: Sequence[Progress]) -> None:
        """Take in a step and leave up to `request.drafts_wanted()` drafts in each request's sequence."""
