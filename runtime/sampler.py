"""From one row of logits to a token: penalties, temperature, min-p, top-k, top-p, and a draw.

Order and meaning follow vLLM: tokens that may not come yet are banned, penalties are applied, then either the
highest logit is taken (temperature 0; ties go to the lower id) or temperature, min-p, top-k and top-p cut the
distribution that is drawn from. Log probabilities are those of the raw logits.

A draw depends only on the request's seed and the token's place: Philox is a counter-based generator, so draw number
i exists without the draws before it, and neither the batch nor a rejected draft can shift it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError
from flashnext.runtime.outputs import Logprob
from flashnext.runtime.sampling_params import Sampling
from flashnext.runtime.speculation.draft import Draft

Floats = NDArray[np.float32]
NUCLEUS_FIRST_TRY = 1024
"""top-p sorts this many of the largest first; sorting a whole vocabulary takes 20 ms and is seldom needed."""


class Sampler:
    """Samples the tokens of one request.

    `stops` are the tokens that would end the text; they are banned while fewer than `min_tokens` came.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        seed: int | None = None,
        stops: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._sampling = sampling
        self._seed = secrets.randbits(63) if seed is None else seed
        self._stops = np.array(sorted(stops), np.int64)
        self._min_tokens = min_tokens
        self._penalties = Penalties(sampling, prompt) if sampling.has_penalties else None
        self._count = 0

    def sample(self, logits: Floats, draft: Draft | None = None) -> int:
        """The next token for logits [V]; it counts as said, so the next call samples the place after it.

        A draft stands if it is the token. One that was not drawn changes nothing: sampling as without it and
        comparing keeps it exactly as often as rejection sampling would. One that was drawn is kept or rejected by
        `verify`.

        Raises:
            EngineError: the logits are not numbers.
        """
        token = self._choose(self._prepare(logits), draft)
        self._count += 1
        if self._penalties:
            self._penalties.add(token)
        return token

    def _prepare(self, logits: Floats) -> Floats:
        early = self._count < self._min_tokens and len(self._stops) > 0
        if not early and self._penalties is None:
            return logits
        logits = logits.copy()
        if early:
            logits[self._stops] = -np.inf
        if self._penalties:
            self._penalties.apply(logits)
        return logits

    def draft(self, logits: Floats, ahead: int) -> Draft:
        """Draw a draft from the draft layer's logits [V], for the place `ahead` of the next one."""
        best = _best(logits)
        if self._sampling.greedy:
            return Draft(best)
        tokens, weights = distribution(logits, self._sampling)
        order = np.argsort(tokens)
        tokens, weights = tokens[order], weights[order] / weights.sum()
        chosen = draw(weights, uniform(self._seed, self._count + ahead, Stream.DRAFT))
        return Draft(int(tokens[chosen]), tokens, weights)

    def _choose(self, logits: Floats, draft: Draft | None) -> int:
        best = _best(logits)
        if self._sampling.greedy:
            return best
        tokens, weights = distribution(logits, self._sampling)
        if draft and draft.tokens is not None and draft.weights is not None:
            if verify(draft, tokens, weights, uniform(self._seed, self._count, Stream.VERIFICATION)):
                return draft.token
            weights = beyond(draft, tokens, weights)
        return int(tokens[draw(weights, uniform(self._seed, self._count))])


def _best(logits: Floats) -> int:
    """The likeliest token, the first of equals.

    Raises:
        EngineError: the logits are not numbers.
    """
    best = int(logits.argmax())  # a NaN if there is one
    if not math.isfinite(logits[best]):
        raise EngineError(
            f"The model's logits hold {logits[best]}; the weights or the engine are broken. "
            "Compare the bundle with the model: flashnext validate BUNDLE."
        )
    return best


class Penalties:
    """Repetition penalty on tokens of prompt and output; presence and frequency penalties on the output's."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._place = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.array(list(self._place), np.int64)
        self._counts = np.zeros(len(self._place), np.float32)

    def add(self, token: int) -> None:
        """Count a token of the output."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):  # room is doubled, so that a long text costs no copy per token
            self._tokens = np.resize(self._tokens, 2 * place + 16)
            self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.float32)])
        self._tokens[place] = token
        self._counts[place] += 1

    def apply(self, logits: Floats) -> None:
        """Change logits [V] in place: repetition, then frequency, then presence."""
        tokens, counts = self._tokens[: len(self._place)], self._counts[: len(self._place)]
        values, repetition = logits[tokens], self._sampling.repetition_penalty
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= self._sampling.frequency_penalty * counts
        values -= self._sampling.presence_penalty * (counts > 0)
        logits[tokens] = values


def distribution(logits: Floats, sampling: Sampling) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens that may be drawn and their weights (not normalised), for a temperature above 0.

    min-p and top-k are both thresholds, so their order does not matter; equals of the k-th largest stay, as in vLLM.
    """
    tokens = _largest(logits, sampling.top_k) if sampling.top_k else np.arange(len(logits))
    scaled = logits[tokens].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    likely = weights >= sampling.min_p if sampling.min_p > 0 else weights > 0
    tokens, weights = tokens[likely], weights[likely]
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        tokens, weights = tokens[kept], weights[kept]
    return tokens, weights


def _largest(values: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values and of all that equal the last of them, in ascending order."""
    if count >= len(values):
        return np.arange(len(values))
    return np.flatnonzero(values >= np.partition(values, -count)[-count])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """The fewest largest weights whose sum reaches `top_p` of the total (at least one); ties to the lower index."""
    wanted = top_p * weights.sum()
    for size in (NUCLEUS_FIRST_TRY, len(weights)):
        chosen = _largest(weights, size)
        order = chosen[np.argsort(-weights[chosen], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted:
            break
    return order[: int(np.searchsorted(reached, wanted)) + 1]


def verify(draft: Draft, tokens: NDArray[np.int64], weights: NDArray[np.float64], fraction: float) -> bool:
    """Whether a drawn draft stands: with probability min(1, p / q) (Leviathan et al., arXiv 2211.17192).

    `tokens` and `weights` (not normalised) are the distribution p that is wanted, `fraction` the draw.
    """
    wanted = float(weights[tokens == draft.token].sum() / weights.sum())
    return bool(fraction * _drafted(draft, np.array([draft.token]))[0] < wanted)


def beyond(draft: Draft, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a rejected draft is replaced from: max(0, p - q), not normalised."""
    wanted: NDArray[np.float64] = weights / weights.sum()
    rest = np.maximum(wanted - _drafted(draft, tokens), 0.0)
    return rest if rest.any() else wanted  # p = q up to rounding: then it hardly ever comes to this


def _drafted(draft: Draft, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probabilities q with which the draft could have been each of `tokens`."""
    assert draft.tokens is not None
    assert draft.weights is not None
    places = np.minimum(np.searchsorted(draft.tokens, tokens), len(draft.tokens) - 1)
    return np.where(draft.tokens[places] == tokens, draft.weights[places], 0.0)


def draw(weights: NDArray[np.float64], fraction: float) -> int:
    """Index of the weight in which `fraction` (0 … 1) of their sum falls."""
    reached = np.cumsum(weights)
    return min(int(np.searchsorted(reached, fraction * reached[-1], side="right")), len(weights) - 1)


class Stream(IntEnum):
    """Independent draws for the same place of a text."""

    TOKEN = 0
    DRAFT = 1
    VERIFICATION = 2


def uniform(seed: int, place: int, stream: Stream = Stream.TOKEN) -> float:
    """The request's draw for one place of its text, in [0, 1)."""
    counter = place + (stream << 64)
    return float(np.random.Generator(np.random.Philox(key=seed % (1 << 64), counter=counter)).random())


def top_logprobs(logits: Floats, token: int, count: int) -> dict[int, Logprob]:
    """Log probabilities of `token` and of the `count` most likely tokens of the raw distribution, best first."""
    wide = logits.astype(np.float64)
    top = wide.max()
    shift = top + np.log(np.exp(wide - top).sum())
    rank = 1 + int((wide > wide[token]).sum()) + int((wide[:token] == wide[token]).sum())
    found = {}
    if count:
        chosen = _largest(wide, count)
        order = chosen[np.argsort(-wide[chosen], kind="stable")][:count]
        found = {int(t): Logprob(float(wide[t] - shift), i + 1) for i, t in enumerate(order)}
    return found | {token: Logprob(float(wide[token] - shift), rank)}
