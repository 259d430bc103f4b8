"""Sampling from the largest logits of a row alone, wherever that provably gives what the whole row would give.

The host knows K logits and that no other is larger than the last of them. That is enough for the likeliest token; for
top-k, if the k-th largest is above the bound (equals of it stay, and all of them are known then); for min-p, if a token
at the bound would be cut; for top-p alone, if the sum over the row says beyond its error where the cut falls. Penalties
and bans that only lower logits leave the bound in force. In every other case the answer is None, and the caller takes
the whole row: what is drawn never depends on how much of a row came to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.distribution import Tokens, Weights, distribution, weights_of
from flashnext.runtime.logits import SUM_ERROR, Floats, LogitRow
from flashnext.runtime.sampling_params import Sampling


@dataclass(frozen=True)
class Shortlist:
    """The largest logits of a row, and what is known of the others."""

    tokens: NDArray[np.int32]
    """[K], in any order"""
    logits: Floats
    """[K]"""
    bound: float
    """No other token's logit is larger; -inf if there is no other token."""
    sum: Callable[[float], float] | None
    """See `LogitRow.sum`; None where logits have been changed."""

    @staticmethod
    def of(row: LogitRow) -> Shortlist | None:
        """None if there are logits that are no numbers, or none that is finite: the whole row tells more."""
        if not math.isfinite(row.sum(1.0)):
            return None
        bound = -math.inf if len(row.tokens) == len(row) else float(row.logits[-1])
        return Shortlist(row.tokens, row.logits, bound, row.sum)

    def lowered(self, logits: Floats) -> Shortlist:
        """With logits [K] that are nowhere larger; no other token's may have been raised."""
        return replace(self, logits=logits, sum=None)

    def best(self) -> int | None:
        """The likeliest token, the first of equals; None if others may be as likely."""
        top = self.logits.max()
        return int(self.tokens[self.logits == top].min()) if top > self.bound else None

    def distribution(self, sampling: Sampling) -> tuple[Tokens, Weights] | None:
        """What the function of this name gives for the whole row, or None if that cannot be said."""
        if not self.logits.max() > self.bound:
            return None
        order = np.argsort(self.tokens)
        tokens, logits = self.tokens[order].astype(np.int64), self.logits[order]
        if self._is_cut_above_others(sampling):
            return distribution(logits, sampling, tokens)
        if self.sum is None or sampling.top_k or sampling.min_p > 0 or sampling.top_p == 1:
            return None
        weights = weights_of(logits, sampling.temperature)
        kept = _nucleus(weights, sampling.top_p * self.sum(sampling.temperature))
        # Weights, not logits: different logits may have equal weights, and then lower ids come first.
        if kept is None or not weights[kept[-1]] > self._most_of_others(sampling.temperature):
            return None
        return tokens[kept], weights[kept]

    def _is_cut_above_others(self, sampling: Sampling) -> bool:
        """Whether top-k or min-p, or a weight too small for a number, leaves out all other tokens."""
        k = sampling.top_k
        if 0 < k <= len(self.logits) and np.partition(self.logits, -k)[-k] > self.bound:
            return True
        most = self._most_of_others(sampling.temperature)
        return most < sampling.min_p if sampling.min_p > 0 else most == 0

    def _most_of_others(self, temperature: float) -> float:
        """What another token's weight is at most."""
        return float(weights_of(np.array([self.bound, self.logits.max()], np.float32), temperature)[0])


def _nucleus(weights: Weights, wanted: float) -> Tokens | None:
    """The fewest largest weights whose sum reaches `wanted`, or all of them; None if that is another set for some sum
    within the error of `wanted`."""
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order])
    first, last = np.searchsorted(reached, (wanted * (1 - SUM_ERROR), wanted * (1 + SUM_ERROR)))
    return order[: first + 1] if first == last else None
