"""What may be drawn from logits: temperature, min-p, top-k and top-p, in vLLM's order and meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.logits import Floats
from flashnext.runtime.sampling_params import Sampling

Tokens = NDArray[np.int64]
Weights = NDArray[np.float64]
NUCLEUS_FIRST_TRY = 1024
"""top-p sorts this many of the largest first; sorting a whole vocabulary takes 20 ms and is seldom needed."""


def distribution(logits: Floats, sampling: Sampling, tokens: Tokens | None = None) -> tuple[Tokens, Weights]:
    """Tokens that may be drawn and their weights (not normalised), for a temperature above 0.

    `tokens` are the ids of the logits, ascending (None: all of the vocabulary). min-p and top-k are both thresholds, so
    their order does not matter; equals of the k-th largest stay, as in vLLM.
    """
    places = largest(logits, sampling.top_k) if sampling.top_k else np.arange(len(logits))
    weights = weights_of(logits[places], sampling.temperature)
    likely = weights >= sampling.min_p if sampling.min_p > 0 else weights > 0
    places, weights = places[likely], weights[likely]
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        places, weights = places[kept], weights[kept]
    return places if tokens is None else tokens[places], weights


def weights_of(logits: Floats, temperature: float) -> Weights:
    """Relative to the largest of the logits, whose weight is 1."""
    scaled = logits.astype(np.float64) / temperature
    weights: Weights = np.exp(scaled - scaled.max())
    return weights


def largest(values: NDArray[Any], count: int) -> Tokens:
    """Indices of the `count` largest values and of all that equal the last of them, in ascending order."""
    if count >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -count)[-count])


def _nucleus(weights: Weights, top_p: float) -> Tokens:
    """The fewest largest weights whose sum reaches `top_p` of the total (at least one); ties to the lower index."""
    wanted = top_p * weights.sum()
    for size in (NUCLEUS_FIRST_TRY, len(weights)):
        chosen = largest(weights, size)
        order = chosen[np.argsort(-weights[chosen], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted:
            break
    return order[: int(np.searchsorted(reached, wanted)) + 1]
