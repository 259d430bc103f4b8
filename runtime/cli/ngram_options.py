"""The options about the n-gram table, for every subcommand that runs a bundle."""

from __future__ import annotations

import argparse
from typing import Any

from flashnext.runtime.cli.parser import Parser, byte_count
from flashnext.runtime.ngram_memory import GATHERERS, KINDS


def add_ngram_options(parser: Parser) -> None:
    """Add the options."""
    add = parser.add_argument_group("n-gram table").add_argument
    kinds = (
        "how it is kept: mapped from its files (default); or in memory for good: locked (its files in the page cache), "
        "huge (a copy in huge pages), pinned (a copy that a GPU may read)"
    )
    add("--ngram-table", choices=KINDS, default="mapped", help=kinds)
    cache = "memory for its rows that were read before, such as 2G; for machines that cannot hold all (default: 0)"
    gather = (
        "tensorrt: who hashes and gathers (default: host); device: the GPU itself, straight from a pinned table over "
        "PCIe (UVA)"
    )
    add("--ngram-gather", choices=GATHERERS, default="host", help=gather)
    add("--ngram-cache", type=byte_count, default=0, metavar="SIZE", help=cache)


def given_ngram_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as keyword arguments of `LLM` and `ModelRunner.open`."""
    return {"ngram_table": arguments.ngram_table, "ngram_cache_bytes": arguments.ngram_cache}


def given_ngram_gather(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as `flashnext.runtime.engines.engine_set.EngineOptions` takes it."""
    return {"ngram_gather": arguments.ngram_gather}
