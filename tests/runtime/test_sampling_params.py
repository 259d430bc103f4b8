"""Sampling parameters: every bad value is refused with its range; None means the model's default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashnext.export.errors import RequestError
from flashnext.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("temperature", -0.1, "temperature = -0.1 is out of range; it must be 0"),
        ("temperature", float("nan"), "finite number"),
        ("temperature", "hot", "finite number"),
        ("temperature", 10**400, "finite number"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_k", -2, "1 or more"),
        ("top_k", 2.5, "whole number"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("repetition_penalty", 1e300, "from 0.01 to 100"),  # would make infinite logits
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -3.0, "from -2 to 2"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", True, "whole number"),
        ("min_tokens", None, "whole number"),
        ("min_tokens", -1, "0 or more"),
        ("seed", 1 << 64, "64-bit"),
        ("logprobs", -1, "0 or more"),
        ("stop", [""], "none of them empty"),
        ("stop", [3], "strings"),
        ("stop", 5, "list of strings"),
        ("stop", {"a": 1}, "list of strings"),
        ("stop", "\udcff", "not valid Unicode"),
        ("ignore_eos", "no", "True or False"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("stop_token_ids", 5, "list of token ids"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)


def test_min_tokens_must_fit_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens = 5 exceeds max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_may_be_one_string() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_numbers_of_numpy_count_as_pythons() -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), stop_token_ids=np.array([4]))  # type: ignore
    assert params == SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=[4])
    assert type(params.max_tokens) is int


def test_none_means_the_models_default_and_then_neutral() -> None:
    sampling = SamplingParams(top_p=0.5).sampling({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True})
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.has_penalties) == (0.0, 1.0, False)


def test_zero_is_a_value_not_a_missing_one() -> None:
    sampling = SamplingParams(temperature=0.0, top_k=0).sampling({"temperature": 0.6, "top_k": 20})
    assert sampling.greedy
    assert sampling.top_k == 0


@pytest.mark.parametrize(
    ("defaults", "temperature"),
    [
        ({}, 1.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.7),
    ],
)
def test_do_sample_matters_only_without_a_temperature(defaults: dict[str, Any], temperature: float) -> None:
    assert SamplingParams().sampling(defaults).temperature == temperature


def test_the_models_defaults_are_checked_too() -> None:
    with pytest.raises(RequestError, match="top_p = 3"):
        SamplingParams().sampling({"top_p": 3.0})
