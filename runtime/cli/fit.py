"""`flashnext info CHECKPOINT --gpu-memory 141G`: what will lie where on a GPU, whether it fits, and what would help."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from flashnext.export.checkpoint.forms import FP8, NVFP4, PLAIN
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.kv_cache import KV_CACHE_DTYPES, KvCache
from flashnext.export.residency import FORM_NAMES, residency
from flashnext.runtime.cli.parser import Parser, UsageError, byte_count, whole_number
from flashnext.runtime.cli.table import amount_of_bytes, render

TABLE_NAMES = {PLAIN: "unquantized", FP8: "FP8", NVFP4: "NVFP4"}
SIZES = {"slots": BuildOptions().slots, "capacity": BuildOptions().capacity, "kv_cache_dtype": "auto"}
"""Options of `info` that say what shall lie on the GPU, and their defaults."""
ACTIVATIONS = "bfloat16"
"""Of the states on a GPU."""


def add_options(parser: Parser) -> None:
    """The options of `info` that are about a GPU."""
    add = parser.add_argument_group("whether a checkpoint fits a GPU").add_argument
    add("--gpu-memory", type=byte_count, metavar="SIZE", help="memory of the GPU: 141G (10^9), or 131GiB (2^30)")
    add("--slots", type=whole_number(1), metavar="N", help=f"texts under way at once (default: {SIZES['slots']})")
    capacity = f"longest text of a slot (default: {SIZES['capacity']})"
    add("--capacity", type=whole_number(1), metavar="TOKENS", help=capacity)
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="keys and values (default: auto, BF16)")


def check_options(arguments: argparse.Namespace) -> None:
    """Raises `UsageError` for options that would change nothing, and for a GPU without memory."""
    if arguments.gpu_memory == 0:
        raise UsageError("--gpu-memory 0 leaves nothing to lay out. Give the memory of the GPU, such as 141G.")
    given = given_sizes(arguments)
    if given and arguments.gpu_memory is None:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{option} is about a GPU. Name its memory with --gpu-memory 141G, or leave {option} out.")


def given_sizes(arguments: argparse.Namespace) -> list[str]:
    """Those of `SIZES` that the command line names."""
    return [name for name in SIZES if getattr(arguments, name) is not None]


def sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """`SIZES` as given."""
    given = {name: getattr(arguments, name) for name in SIZES}
    return {name: SIZES[name] if value is None else value for name, value in given.items()}


def variant(checkpoint: Checkpoint) -> str:
    """How the weights are stored, in words."""
    config, forms = checkpoint.config, checkpoint.forms
    layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
    counts = Counter(FORM_NAMES[forms.expert_form(layer)] for layer in layers)
    experts = " and ".join(f"{form} ({n} layers)" if len(counts) > 1 else form for form, n in counts.items())
    words = [f"experts {experts}, {'one by one' if forms.per_expert else 'fused'}"]
    if config.has_mtp:
        words.append(f"MTP experts {FORM_NAMES[forms.expert_form('mtp.layers.0')]}")
    words += [f"n-gram table of layer {i} {TABLE_NAMES[forms.table(i).form]}" for i in config.ngram_layers]
    return "; ".join(words)


def fit_facts(
    checkpoint: Checkpoint, gpu_bytes: int, slots: int, capacity: int, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """What lies where, as plain data."""
    cache = KvCache.unscaled(checkpoint.config) if kv_cache_dtype == "fp8" else KvCache()
    options = BuildOptions(capacity=capacity, slots=slots, dtype=ACTIVATIONS, kv_cache=cache)
    options.check(checkpoint.config)
    placed = residency(checkpoint.tensors, checkpoint.config, checkpoint.forms, options, gpu_bytes)
    return {
        "gpu_bytes": gpu_bytes,
        "slots": slots,
        "capacity": capacity,
        "window": options.window,
        "state_dtype": options.dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "device": placed.device,
        "pinned_host": placed.pinned,
        "mapped": placed.mapped,
        "free_bytes": placed.free,
        "fits": placed.fits,
        "remedies": placed.remedies,
    }


def fit_lines(facts: dict[str, Any]) -> list[str]:
    """The facts as people read them."""
    places = (("device", "device"), ("pinned_host", "pinned host"), ("mapped", "mapped from the files"))
    rows = [[part, where, amount_of_bytes(size)] for key, where in places for part, size in facts[key].items()]
    device = sum(facts["device"].values())
    verdict = f"{amount_of_bytes(device)} of {amount_of_bytes(facts['gpu_bytes'])} on the device: "
    if facts["fits"]:
        verdict += f"it fits, {amount_of_bytes(facts['free_bytes'])} stay free."
    else:
        verdict += f"{amount_of_bytes(-facts['free_bytes'])} too much. Any of these would make it fit: "
        verdict += "; ".join(facts["remedies"]) + "."
    kept = facts["state_dtype"] + (", keys and values fp8" if facts["kv_cache_dtype"] == "fp8" else "")
    title = f"on a GPU, {facts['slots']} slots of {facts['capacity']:,} tokens ({kept}):"
    return ["", title, "", render(["part", "where", "size"], rows), "", verdict]
