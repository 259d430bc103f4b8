"""From one row of logits to a token: penalties, temperature, min-p, top-k, top-p, and a draw.

Order and meaning follow vLLM: tokens that may not come yet are banned, penalties are applied, then either the
highest logit is taken (temperature 0; ties go to the lower id) or temperature, min-p, top-k and top-p cut the
distribution that is drawn from. Log probabilities are those of the raw logits.

A row that stays on a device (`LogitRow`) is asked for its largest logits first, and for the rest only where they do not
settle what may be drawn (shortlist.py).

A draw depends only on the request's seed and the token's place: Philox is a counter-based generator, so draw number
i exists without the draws before it, and neither the batch nor a rejected draft can shift it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError
from flashnext.runtime.distribution import Tokens, Weights, distribution, largest
from flashnext.runtime.logits import Floats, LogitRow, likeliest, whole
from flashnext.runtime.outputs import Logprob
from flashnext.runtime.sampling_params import Sampling
from flashnext.runtime.shortlist import Shortlist
from flashnext.runtime.speculation.draft import Draft


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

    def sample(self, logits: Floats | LogitRow, draft: Draft | None = None) -> int:
        """The next token for logits [V]; it counts as said, so the next call samples the place after it.

        A draft stands if it is the token. One that was not drawn changes nothing: sampling as without it and
        comparing keeps it exactly as often as rejection sampling would. One that was drawn is kept or rejected by
        `verify`.

        Raises:
            EngineError: the logits are not numbers.
        """
        token = self._choose(logits, draft)
        self._count += 1
        if self._penalties:
            self._penalties.add(token)
        return token

    def draft(self, logits: Floats | LogitRow, ahead: int) -> Draft:
        """Draw a draft from the draft layer's logits [V], for the place `ahead` of the next one."""
        if self._sampling.greedy:
            return Draft(self._likeliest(logits, changed=False))
        tokens, weights = self._possible(logits, changed=False)
        order = np.argsort(tokens)
        tokens, weights = tokens[order], weights[order] / weights.sum()
        chosen = draw(weights, uniform(self._seed, self._count + ahead, Stream.DRAFT))
        return Draft(int(tokens[chosen]), tokens, weights)

    def _choose(self, logits: Floats | LogitRow, draft: Draft | None) -> int:
        if self._sampling.greedy:
            return self._likeliest(logits, changed=True)
        tokens, weights = self._possible(logits, changed=True)
        if draft and draft.tokens is not None and draft.weights is not None:
            if verify(draft, tokens, weights, uniform(self._seed, self._count, Stream.VERIFICATION)):
                return draft.token
            weights = beyond(draft, tokens, weights)
        return int(tokens[draw(weights, uniform(self._seed, self._count))])

    def _likeliest(self, logits: Floats | LogitRow, changed: bool) -> int:
        """The token of greedy text; `changed`: by penalties and bans first."""
        short = self._short(logits, changed)
        best = short.best() if short else None
        return _best(self._row(logits, changed)) if best is None else best

    def _possible(self, logits: Floats | LogitRow, changed: bool) -> tuple[Tokens, Weights]:
        """Tokens that may be drawn and their weights; `changed`: by penalties and bans first."""
        short = self._short(logits, changed)
        found = short.distribution(self._sampling) if short else None
        if found is not None:
            return found
        row = self._row(logits, changed)
        _best(row)  # raises where they are no numbers
        return distribution(row, self._sampling)

    def _row(self, logits: Floats | LogitRow, changed: bool) -> Floats:
        """All logits [V]."""
        row = whole(logits)
        return self._prepare(row) if changed else row

    def _short(self, logits: Floats | LogitRow, changed: bool) -> Shortlist | None:
        """The largest logits; None where there are all of them, or where these do not tell enough."""
        if isinstance(logits, np.ndarray):
            return None
        short = Shortlist.of(logits)
        return self._shortened(short) if short and changed else short

    def _prepare(self, logits: Floats) -> Floats:
        if not self._is_early and self._penalties is None:
            return logits
        logits = logits.copy()
        if self._is_early:
            logits[self._stops] = -np.inf
        if self._penalties:
            self._penalties.apply(logits)
        return logits

    def _shortened(self, short: Shortlist) -> Shortlist | None:
        """`_prepare` for a row's largest logits; None where it may raise some of the others."""
        if not self._is_early and self._penalties is None:
            return short
        if self._penalties and self._penalties.raise_logits:
            return None
        logits = short.logits.copy()
        if self._is_early:
            logits[np.isin(short.tokens, self._stops)] = -np.inf
        if self._penalties:
            self._penalties.apply(logits, short.tokens)
        return short.lowered(logits)

    @property
    def _is_early(self) -> bool:
        return self._count < self._min_tokens and len(self._stops) > 0


def _best(logits: Floats) -> int:
    """The likeliest token, the first of equals.

    Raises:
        EngineError: the logits are not numbers.
    """
    best = likeliest(logits)  # a NaN if there is one
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

    @property
    def raise_logits(self) -> bool:
        """Whether some token's logit may become larger."""
        s = self._sampling
        return s.repetition_penalty < 1 or s.frequency_penalty < 0 or s.presence_penalty < 0

    def apply(self, logits: Floats, ids: NDArray[np.int32] | None = None) -> None:
        """Change logits in place, of the tokens `ids` (None: of all): repetition, then frequency, then presence."""
        if ids is None:
            tokens, counts = self._tokens[: len(self._place)], self._counts[: len(self._place)]
        else:
            places = np.array([self._place.get(token, -1) for token in ids.tolist()], np.int64)
            tokens = np.flatnonzero(places >= 0)
            counts = self._counts[places[tokens]]
        values, repetition = logits[tokens], self._sampling.repetition_penalty
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= self._sampling.frequency_penalty * counts
        values -= self._sampling.presence_penalty * (counts > 0)
        logits[tokens] = values


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


def top_logprobs(logits: Floats | LogitRow, token: int, count: int) -> dict[int, Logprob]:
    """Log probabilities of `token` and of the `count` most likely tokens of the raw distribution, best first."""
    if not isinstance(logits, np.ndarray) and count <= len(logits.tokens) and token in logits.tokens:
        return _known_logprobs(logits, token, count)
    wide = whole(logits).astype(np.float64)
    top = wide.max()
    shift = top + np.log(np.exp(wide - top).sum())
    rank = 1 + int((wide > wide[token]).sum()) + int((wide[:token] == wide[token]).sum())
    found = {}
    if count:
        chosen = largest(wide, count)
        order = chosen[np.argsort(-wide[chosen], kind="stable")][:count]
        found = {int(t): Logprob(float(wide[t] - shift), i + 1) for i, t in enumerate(order)}
    return found | {token: Logprob(float(wide[token] - shift), rank)}


def _known_logprobs(row: LogitRow, token: int, count: int) -> dict[int, Logprob]:
    """The same where all of them are among the row's largest."""
    wide = row.logits.astype(np.float64)
    shift = wide[0] + math.log(row.sum(1.0))
    place = int(np.flatnonzero(row.tokens == token)[0])
    places = [*range(count), place]
    return {int(row.tokens[i]): Logprob(float(wide[i] - shift), i + 1) for i in places}
