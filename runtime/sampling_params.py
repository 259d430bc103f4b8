"""What a caller may ask of a generation: lengths, sampling, penalties, stops, log probabilities.

Names and meanings are vLLM's. A value of None means the model's default (generation_config.json, kept in the
bundle's manifest), and without one there the neutral value. Everything is checked when the object is made, before
anything runs.

    SamplingParams(max_tokens=64, temperature=0.0, stop=["\\n\\n"])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashnext.export.errors import RequestError
from flashnext.export.files import is_finite
from flashnext.runtime.speculation.draft import DRAFTERS

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy (as in vLLM): dividing by them would only overflow."""

NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "0 (greedy) or more"),
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (0.01, 100.0, "from 0.01 to 100"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
    "max_seconds": (0.0, math.inf, "0 or more, or None (no limit)"),
}

WHOLE: dict[str, tuple[int, str]] = {
    "max_tokens": (1, "1 or more, or None (as many as fit)"),
    "min_tokens": (0, "0 or more"),
    "top_k": (-1, "1 or more; 0 or -1 for all tokens"),
    "seed": (-(1 << 63), "a 64-bit integer"),
    "logprobs": (0, "0 or more"),
    "draft_tokens": (0, "0 (no speculation) or more"),
}
NEVER_NONE = ("min_tokens", "draft_tokens")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The numbers that shape the distribution, all of them decided."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's wishes; see the module's docstring for None.

    `stop` are strings that end the text and are cut from it. `stop_token_ids` end it besides the model's own stop
    tokens; `ignore_eos` switches only the model's own off. `min_tokens` come before any stop counts. `logprobs=n`
    returns the n most likely tokens of the raw distribution at each place and the sampled one. Equal `seed`s give
    equal texts, whatever else is in the batch.

    `max_seconds` after its arrival, queueing included, a request ends with what it has said by then (finish reason
    "deadline"); a step that has begun is not broken off.

    `draft_tokens` are guessed ahead and verified in one step (0: none; at most the bundle's window - 1). The text is
    the one without them, or, with drafts that were drawn ("mtp-sampled"), one of the same distribution. `drafter` says
    who guesses: "mtp" and "mtp-sampled" (the draft layer's likeliest tokens, or drawn ones), "prompt-lookup" (what
    followed the same words before). With `draft_adaptive` fewer are drafted, or none any more, where they do not pay.

    Raises:
        RequestError: a value out of range or of the wrong type, each with the range in its sentence.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    max_seconds: float | None = None
    draft_tokens: int = 0
    drafter: str = "mtp"
    draft_adaptive: bool = True

    def __post_init__(self) -> None:
        for name in (*RANGES, *WHOLE):  # numpy's numbers count as Python's
            object.__setattr__(self, name, _plain_number(getattr(self, name)))
        for name, (low, high, allowed) in RANGES.items():
            _check_number(name, getattr(self, name), low, high, allowed)
        for name, (least, allowed) in WHOLE.items():
            _check_whole(name, getattr(self, name), least, allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens = {self.min_tokens} exceeds max_tokens = {self.max_tokens}; lower it.")
        for name in ("ignore_eos", "draft_adaptive"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, found {getattr(self, name)!r:.80}.")
        if self.drafter not in DRAFTERS:
            raise RequestError(f"drafter must be one of {', '.join(DRAFTERS)}; found {self.drafter!r:.80}.")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def sampling(self, defaults: Mapping[str, Any]) -> Sampling:
        """The numbers decided: given here, else the model's default, else neutral.

        A model that says `do_sample: false` without a temperature is meant to be decoded greedily; otherwise
        `do_sample` is not looked at and temperatures count as given (vLLM's convention).
        """
        neutral = dict(NEUTRAL)
        if defaults.get("do_sample") is False:
            neutral["temperature"] = 0.0
        decided = {name: _first(getattr(self, name), defaults.get(name), value) for name, value in neutral.items()}
        SamplingParams(**decided)  # the model's defaults are data from strangers: the same checks
        return Sampling(**{**decided, "top_k": max(int(decided["top_k"]), 0)})


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _plain_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        raise RequestError(f"{name} must be a finite number, found {value!r:.80}.")
    if not low <= value <= high:
        raise RequestError(f"{name} = {value} is out of range; it must be {allowed}.")


def _check_whole(name: str, value: Any, least: int, allowed: str) -> None:
    if value is None and name not in NEVER_NONE:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, found {value!r}.")
    if not least <= value < 1 << 63:
        raise RequestError(f"{name} = {value} is out of range; it must be {allowed}.")


def _strings(value: Any) -> tuple[str, ...]:
    items = () if value is None else (value,) if isinstance(value, str) else _items("stop", value, "strings")
    if not all(isinstance(s, str) and s for s in items):
        raise RequestError(f"stop must be a string or strings, none of them empty; found {value!r:.80}.")
    if any("\ud800" <= character <= "\udfff" for s in items for character in s):
        raise RequestError(f"stop = {value!r:.80} is not valid Unicode (a lone surrogate); send it as UTF-8.")
    return items


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list of {what}, found {value!r:.80}.")
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    items = () if value is None else tuple(map(_plain_number, _items("stop_token_ids", value, "token ids")))
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
        raise RequestError(f"stop_token_ids must be token ids (0 or more), found {value!r:.80}.")
    return items
