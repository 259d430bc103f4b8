"""The sampling options are the fields of SamplingParams."""

from __future__ import annotations

import dataclasses

from flashnext.runtime import SamplingParams
from flashnext.runtime.cli.parser import Parser
from flashnext.runtime.cli.sampling_options import OPTIONS, add_sampling_options, given_sampling


def parse(*argv: str) -> SamplingParams:
    parser = Parser()
    add_sampling_options(parser)
    return SamplingParams(**given_sampling(parser.parse_args(argv)))


def test_every_field_has_an_option() -> None:
    assert set(OPTIONS) == {f.name for f in dataclasses.fields(SamplingParams)}


def test_nothing_given_is_the_default() -> None:
    assert parse() == SamplingParams()


def test_given_values_arrive() -> None:
    argv = "--max-tokens 5 --temperature 0 --top-p 0.9 --seed -3 --stop a --stop b --stop-token-ids 7,8 --ignore-eos"
    expected = SamplingParams(
        max_tokens=5, temperature=0.0, top_p=0.9, seed=-3, stop=["a", "b"], stop_token_ids=[7, 8], ignore_eos=True
    )
    assert parse(*argv.split()) == expected
