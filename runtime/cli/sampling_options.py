"""The options that become `SamplingParams`: one for each of its fields, with the same name. A test compares the two."""

from __future__ import annotations

import argparse
from typing import Any

from flashnext.runtime.cli.parser import Parser, number, token_ids, whole_number
from flashnext.runtime.speculation.draft import DRAFTERS

MAX_SEED = (1 << 63) - 1

OPTIONS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": whole_number(1), "metavar": "N", "help": "end after this many tokens (default: what fits)"},
    "min_tokens": {"type": whole_number(0), "metavar": "N", "help": "nothing ends the text before this many tokens"},
    "temperature": {"type": number, "metavar": "T", "help": "0 takes the likeliest token; higher is more varied"},
    "top_k": {"type": whole_number(-1), "metavar": "K", "help": "sample among the K likeliest tokens; 0: all"},
    "top_p": {"type": number, "metavar": "P", "help": "sample among the likeliest tokens that sum to P"},
    "min_p": {"type": number, "metavar": "P", "help": "leave out tokens below P times the likeliest one's probability"},
    "repetition_penalty": {"type": number, "metavar": "F", "help": "divide the odds of tokens seen before; 1: off"},
    "presence_penalty": {"type": number, "metavar": "F", "help": "subtract for tokens already generated; 0: off"},
    "frequency_penalty": {"type": number, "metavar": "F", "help": "subtract per time a token was generated; 0: off"},
    "seed": {"type": whole_number(-MAX_SEED - 1, MAX_SEED), "metavar": "N", "help": "equal seeds give equal texts"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before this text; may be given several times"},
    "stop_token_ids": {"type": token_ids, "metavar": "IDS", "help": 'end at any of these tokens, such as "7,8"'},
    "ignore_eos": {"action": "store_true", "help": "go on past the model's own end"},
    "draft_tokens": {"type": whole_number(0), "metavar": "K", "help": "guess up to K tokens ahead per step; 0: off"},
    "drafter": {"choices": DRAFTERS, "help": "who guesses: the draft layer (mtp, default), or a look-up in the text"},
    "draft_adaptive": {"action": argparse.BooleanOptionalAction, "help": "draft fewer where it does not pay (default)"},
    "max_seconds": {"type": number, "metavar": "S", "help": "end with what has been said after S seconds"},
    "logprobs": {"type": whole_number(0), "metavar": "N", "help": "with --json: log probabilities of the N likeliest"},
}


def add_sampling_options(parser: Parser) -> None:
    """Add the options; those not given are not set."""
    group = parser.add_argument_group("sampling", "Defaults are the model's own (generation_config.json).")
    for name, settings in OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **settings)


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as keyword arguments of `SamplingParams`."""
    return {name: getattr(arguments, name) for name in OPTIONS if hasattr(arguments, name)}
