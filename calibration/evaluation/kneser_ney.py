"""Interpolated modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3): the baseline to be beaten.

    p(w | h) = (c(h w) - D(c)) / c(h) + gamma(h) p(w | h without its first token)

The highest order counts occurrences, lower orders count distinct tokens before an n-gram; below single tokens lies
the uniform distribution. D depends on whether the count is 1, 2 or more, by the usual estimate from counts of counts.
Five tokens of twelve bits fit one 64-bit integer, so an n-gram is a number and counting is sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Order:
    """Counts of one order: n-grams and contexts as sorted numbers."""

    grams: Keys
    counts: NDArray[np.int64]
    contexts: Keys
    totals: NDArray[np.int64]
    discounts: Floats
    """D for counts 0, 1, 2, 3 and more"""
    backoff: Floats
    """gamma of each context: the mass that its discounts set free"""


class KneserNey:
    """A model of tokens below `vocabulary`, counted from a stream."""

    def __init__(self, tokens: NDArray[Any], vocabulary: int, order: int = 5) -> None:
        self.vocabulary, self.bits = vocabulary, max(1, (vocabulary - 1).bit_length())
        if order * self.bits > 62:
            raise ValueError(f"{order} tokens of {self.bits} bits do not fit a 64-bit integer")
        grams, counts = np.unique(self._keys(tokens, order), return_counts=True)
        self.orders = [self._order(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Distinct n-grams one longer, without their first token: how many tokens come before each shorter one.
            # The stream's own beginnings have nothing before them and are left out.
            grams, counts = np.unique(grams & ((1 << self.bits * length) - 1), return_counts=True)
            self.orders.append(self._order(grams, counts))
        self.orders.reverse()

    def probabilities(self, tokens: NDArray[Any]) -> Floats:
        """p(token | the tokens before it) for every token of a stream; the first ones have shorter contexts."""
        tokens = tokens.astype(np.int64)
        p = np.full(len(tokens), 1.0 / self.vocabulary)
        for length, order in enumerate(self.orders, start=1):
            keys = self._keys(tokens, length)
            if len(keys):
                p[length - 1 :] = self._interpolated(order, keys, p[length - 1 :])
        return p

    def _interpolated(self, order: Order, keys: Keys, lower: Floats) -> Floats:
        counts = _lookup(order.grams, order.counts, keys)
        contexts = keys >> self.bits
        totals = _lookup(order.contexts, order.totals, contexts)
        backoff = _lookup(order.contexts, order.backoff, contexts)
        seen = totals > 0
        kept = counts - order.discounts[np.minimum(counts, 3)]
        return np.where(seen, kept / np.maximum(totals, 1) + backoff * lower, lower)

    def _order(self, grams: Keys, counts: NDArray[np.int64]) -> Order:
        discounts = _discounts(counts)
        contexts, first = np.unique(grams >> self.bits, return_index=True)
        totals = np.add.reduceat(counts, first)
        freed = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
        return Order(grams, counts, contexts, totals, discounts, freed / totals)

    def _keys(self, tokens: NDArray[Any], length: int) -> Keys:
        """Every run of `length` tokens as a number, the first token in the highest bits."""
        stream = tokens.astype(np.int64)
        count = max(len(stream) - length + 1, 0)
        keys = np.zeros(count, np.int64)
        for place in range(length):
            keys = (keys << self.bits) | stream[place : place + count]
        return keys


def _discounts(counts: NDArray[np.int64]) -> Floats:
    n1, n2, n3, n4 = (max(int((counts == k).sum()), 1) for k in (1, 2, 3, 4))
    d = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * d * n2 / n1, 2 - 3 * d * n3 / n2, 3 - 4 * d * n4 / n3)
    # Tiny texts give estimates outside of what a count can spare.
    return np.array([0.0, *(min(max(e, 0.1), k + 0.9) for k, e in enumerate(estimates))])


def _lookup(keys: Keys, values: NDArray[Any], wanted: Keys) -> NDArray[Any]:
    """Values of the wanted keys, 0 for those that are not there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
