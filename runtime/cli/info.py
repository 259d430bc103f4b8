"""`flashnext info`: what a checkpoint or a bundle holds, and the memory it takes. Reads headers only."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from flashnext.export.config import SPARSE_ATTENTION, ModelConfig
from flashnext.export.graphs import manifest as manifests
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.inventory import context_lengths, count_parts, slot_bytes, state_bytes, total
from flashnext.export.kv_cache import KvCache
from flashnext.runtime.cli import fit
from flashnext.runtime.cli.parser import Commands, Parser, UsageError
from flashnext.runtime.cli.table import amount, amount_of_bytes, render

DESCRIPTION = """\
Say what a checkpoint or a bundle holds: the model's sizes, parameters and bytes by part, and the memory that a slot
(one text under way) takes at different context lengths. Reads headers only, whatever the size."""

EXAMPLES = """\
examples:
  flashnext info Qwen3.8-Flash-Next          a checkpoint
  flashnext info Qwen3.8-Flash-Next --gpu-memory 141G --slots 4 --capacity 32768
  flashnext info my-bundle                   a bundle
  flashnext info my-bundle --json | jq .slot_bytes
"""

STATES = {
    "float32": BuildOptions(),
    "bfloat16": BuildOptions(dtype="bfloat16"),
    "bfloat16, FP8 cache": BuildOptions(dtype="bfloat16", kv_cache=KvCache("fp8")),
}
"""How a slot's states may be kept."""
BUNDLE_FACTS = (
    *("dtype", "window", "capacity", "slots", "residual_dtype", "residual_mode", "residual_scales"),
    *("recurrent_dtype", "kv_cache_dtype", "kv_cache_scales"),
)


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "info",
        help="what a checkpoint or bundle holds, and its memory",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        parents=parents,
    )
    parser.add_argument("folder", metavar="CHECKPOINT|BUNDLE", help="folder to look into")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    fit.add_options(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    facts = describe(Path(arguments.folder), arguments)
    print(json.dumps(facts, indent=1) if arguments.json else text(facts))
    return 0


def describe(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The facts about a folder, as plain data."""
    if (folder / manifests.FILE_NAME).is_file():
        if arguments.gpu_memory is not None or fit.given_sizes(arguments):
            raise UsageError(
                "--gpu-memory and the options beside it are about checkpoints; "
                f"{folder} is a bundle. Name the checkpoint itself."
            )
        return bundle_facts(folder)
    if (folder / "config.json").is_file():
        fit.check_options(arguments)
        return checkpoint_facts(folder, arguments.gpu_memory, **fit.sizes(arguments))
    raise UsageError(
        f"{folder} is neither a bundle (no {manifests.FILE_NAME}) nor a checkpoint (no config.json). "
        "Name a folder that is one of them."
    )


def checkpoint_facts(
    folder: Path, gpu_bytes: int | None = None, slots: int = 1, capacity: int = 1, kv_cache_dtype: str = "auto"
) -> dict[str, Any]:
    """What a checkpoint's headers say, and with `gpu_bytes` whether it fits a GPU."""
    from flashnext.export.checkpoint.reader import Checkpoint

    checkpoint = Checkpoint.open(folder, notes=lambda line: print(f"flashnext: {line}", file=sys.stderr))
    config, window = checkpoint.config, BuildOptions().window
    return {
        "kind": "checkpoint",
        "folder": str(folder),
        "variant": fit.variant(checkpoint),
        "model": model_facts(config),
        "parts": [dataclasses.asdict(p) for p in count_parts(checkpoint.tensors)],
        "total": dataclasses.asdict(total(count_parts(checkpoint.tensors))),
        "window": window,
        "slot_bytes_by_context": slot_bytes_by_context(config, window),
        **({"gpu": fit.fit_facts(checkpoint, gpu_bytes, slots, capacity, kv_cache_dtype)} if gpu_bytes else {}),
    }


def bundle_facts(folder: Path) -> dict[str, Any]:
    """What a bundle's manifest says."""
    manifest = Manifest.read(folder)
    return {
        "kind": "bundle",
        "folder": str(folder),
        "model": model_facts(manifest.config),
        **{name: getattr(manifest, name) for name in BUNDLE_FACTS},
        "checkpoint": manifest.checkpoint.path,
        "checkpoint_found": Path(manifest.checkpoint.path).is_dir(),
        "graphs": {name: (folder / graph.file).stat().st_size for name, graph in manifest.graphs.items()},
        "slot_bytes": state_bytes(manifest.graphs.values()),
        "slot_bytes_by_context": slot_bytes_by_context(manifest.config, manifest.window),
    }


def model_facts(config: ModelConfig) -> dict[str, Any]:
    """The sizes that tell models apart."""
    sparse = config.layer_types.count(SPARSE_ATTENTION)
    return {
        "layers": config.num_hidden_layers,
        "sparse_attention_layers": sparse,
        "gated_delta_net_layers": config.num_hidden_layers - sparse,
        "hidden_size": config.hidden_size,
        "residual_branches": config.hc_count,
        "vocabulary": config.vocab_size,
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "context": config.max_position_embeddings,
        "rope": config.rope.rope_type,
        "indexer_budget": config.indexer_budget,
        "ngram_layers": list(config.ngram_layers),
        "mtp_layers": config.mtp_num_hidden_layers,
    }


def slot_bytes_by_context(config: ModelConfig, window: int) -> dict[str, dict[str, int]]:
    """Memory of one slot by how its states are kept and by the tokens that it can hold."""
    return {
        kept: {
            str(n): slot_bytes(config, dataclasses.replace(options, window=window, capacity=n, slots=1))
            for n in context_lengths(config)
        }
        for kept, options in STATES.items()
    }


def text(facts: dict[str, Any]) -> str:
    """The facts as people read them."""
    lines = [f"{facts['kind']}  {facts['folder']}", "", *_model_lines(facts["model"])]
    lines += _bundle_lines(facts) if facts["kind"] == "bundle" else _part_lines(facts)
    return "\n".join([*lines, *_memory_lines(facts), *(fit.fit_lines(facts["gpu"]) if "gpu" in facts else [])])


def _model_lines(model: dict[str, Any]) -> list[str]:
    injected = ", ".join(map(str, model["ngram_layers"])) or "none"
    return [
        f"layers      {model['layers']}: {model['gated_delta_net_layers']} gated delta net, "
        f"{model['sparse_attention_layers']} sparse attention (budget {model['indexer_budget']:,} tokens)",
        f"sizes       hidden {model['hidden_size']:,} x {model['residual_branches']} residual branches, "
        f"vocabulary {model['vocabulary']:,}, {model['experts_per_token']} of {model['experts']} experts",
        f"context     {model['context']:,} tokens (rope: {model['rope']})",
        f"n-grams     injected before layers: {injected}",
        f"MTP layers  {model['mtp_layers']}",
        "",
    ]


def _part_lines(facts: dict[str, Any]) -> list[str]:
    rows = [
        [p["name"], f"{p['tensors']:,}", amount(p["parameters"]), amount_of_bytes(p["bytes"])]
        for p in (*facts["parts"], facts["total"])
    ]
    return [f"stored      {facts['variant']}", "", render(["part", "tensors", "parameters", "size"], rows), ""]


def _bundle_lines(facts: dict[str, Any]) -> list[str]:
    graphs = ", ".join(f"{name} {amount_of_bytes(size)}" for name, size in facts["graphs"].items())
    found = "" if facts["checkpoint_found"] else "  (not there: name it with --checkpoint when running)"
    return [
        f"graphs      {graphs} ({facts['dtype']}, residual {_residual(facts)}{_cache(facts)})",
        f"weights     {facts['checkpoint']}{found}",
        f"slots       {facts['slots']} of {facts['capacity']:,} tokens, window {facts['window']}; "
        f"memory {facts['slots']} x {amount_of_bytes(facts['slot_bytes'])}",
        "",
    ]


def _residual(facts: dict[str, Any]) -> str:
    """`bfloat16`, or `float8_e4m3fn, static scales 0.012 … 3.4`."""
    if facts["residual_mode"] == "plain":
        return str(facts["residual_dtype"])
    scales = [scale for of_store in facts["residual_scales"].values() for scale in of_store]
    span = f" {min(scales):.2g} … {max(scales):.2g}" if scales else ""
    return f"{facts['residual_dtype']}, {facts['residual_mode']} scales{span}"


def _cache(facts: dict[str, Any]) -> str:
    """`; keys and values fp8, scales 0.01 … 1`, if they are not as the rest."""
    scales = [scale for of_layer in facts["kv_cache_scales"].values() for scale in of_layer]
    if not scales:
        return ""
    return f"; keys and values {facts['kv_cache_dtype']}, scales {min(scales):.2g} … {max(scales):.2g}"


def _memory_lines(facts: dict[str, Any]) -> list[str]:
    by_context = facts["slot_bytes_by_context"]
    contexts = by_context["float32"]
    rows = [[f"{int(n):,}", *(amount_of_bytes(sizes[n]) for sizes in by_context.values())] for n in contexts]
    return [f"memory of one slot (window {facts['window']}) by the tokens that it can hold:", "",
            render(["tokens", *by_context], rows)]  # fmt: skip
