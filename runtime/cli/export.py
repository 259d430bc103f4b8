"""`flashnext export`: from a checkpoint to a bundle. The work is done by `flashnext.export.graphs.bundle`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any, NoReturn

from tqdm import tqdm

from flashnext.export.graphs.io import MAX_WINDOW, BuildOptions
from flashnext.export.kv_cache import KV_CACHE_DTYPES
from flashnext.export.progress import progress_bar
from flashnext.export.residual_scales import RESIDUAL_FORMS
from flashnext.runtime.cli.parser import Commands, Parser, whole_number

DESCRIPTION = """\
Write the ONNX graphs of a checkpoint and a manifest into a folder, the bundle. The weights are neither copied nor
loaded: the graphs point into the checkpoint's safetensors files, so the checkpoint has to stay where it is (or be named
again with --checkpoint when running). The bundle appears whole or not at all."""

EXAMPLES = """\
examples:
  flashnext export Qwen3.8-Flash-Next my-bundle
  flashnext export CHECKPOINT BUNDLE --capacity 32768 --slots 4      four texts at once, of up to 32,768 tokens each
  flashnext export CHECKPOINT BUNDLE --rope-scaling yarn:4           contexts up to four times the native length
  flashnext export CHECKPOINT BUNDLE --rope-scaling '{"rope_type":"yarn","factor":4.0,"beta_fast":32}'
  flashnext export CHECKPOINT BUNDLE --residual fp8 --scales scales.json
  flashnext export CHECKPOINT BUNDLE --kv-cache-dtype fp8            half of BF16's keys and values
  flashnext export CHECKPOINT BUNDLE --beside                        for trtexec and the polygraphy command
"""


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "export", help="checkpoint to bundle", description=DESCRIPTION, epilog=EXAMPLES, parents=parents
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder in Hugging Face layout")
    parser.add_argument("bundle", metavar="BUNDLE", help="folder to make")
    add = parser.add_argument_group("sizes").add_argument
    kept = BuildOptions()
    capacity = f"longest text of a slot, prompt included (default: {kept.capacity}, or the context)"
    window = f"tokens that one verification step can take (default: {kept.window})"
    add("--capacity", type=whole_number(1), metavar="TOKENS", help=capacity)
    add("--slots", type=whole_number(1), metavar="N", help=f"texts under way at once (default: {kept.slots})")
    add("--window", type=whole_number(1, MAX_WINDOW), metavar="TOKENS", help=window)
    add = parser.add_argument_group("model").add_argument
    add("--dtype", choices=("float32", "bfloat16"), help="float32 (default) is what ONNX Runtime needs on a CPU")
    add("--residual", dest="residual_form", choices=RESIDUAL_FORMS, help=RESIDUAL_HELP)
    add("--scales", metavar="FILE", help="scales of --residual fp8, as flashnext calibrate writes them for CHECKPOINT")
    recurrent = "recurrent states; bfloat16 halves them (default: float32)"
    add("--recurrent-dtype", choices=("float32", "bfloat16"), help=recurrent)
    add("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help=CACHE_HELP)
    add("--indexer-budget", type=whole_number(1), metavar="TOKENS", help="tokens that sparse attention may choose")
    add("--rope-scaling", type=rope_scaling, metavar="SCALING", help="longer contexts: yarn:FACTOR, or JSON as below")
    add = parser.add_argument_group("writing").add_argument
    add("--beside", action="store_true", help="write the graphs next to the checkpoint's shards too")
    add("--overwrite", action="store_true", help="replace a bundle that is already there")
    return parser


RESIDUAL_HELP = (
    "how the residual branches are kept: plain (default) in --dtype, fp8 with the static scales of --scales, "
    "fp8-dynamic with a scale per token and branch"
)
CACHE_HELP = (
    "keys and values of sparse attention: auto (default) in --dtype, fp8 as E4M3 with the checkpoint's own k_scale and "
    "v_scale, or 1"
)
SCALING_FORMS = (
    'yarn:FACTOR, or JSON such as {"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":262144}'
)


def rope_scaling(text: str) -> dict[str, Any]:
    """Converter for --rope-scaling; the values are checked with the rest of the model configuration."""
    kind, _, factor = text.partition(":")
    try:
        value = {"rope_type": "yarn", "factor": float(factor)} if kind == "yarn" else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not {"rope_type", "type"} & set(value):
        raise argparse.ArgumentTypeError(f"expected {SCALING_FORMS}, found {text!r:.80}")
    return value


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.export.graphs.bundle import ExportOptions, export_bundle

    names = {field.name for field in dataclasses.fields(ExportOptions)} & vars(arguments).keys()
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    start = time.perf_counter()
    with progress_bar(None, "graphs", delay=0) as bar:
        export_bundle(
            arguments.checkpoint,
            arguments.bundle,
            ExportOptions(**given),
            note=lambda line: _remark(line, bar),
            progress=lambda graph: bar.set_description(f"exporting {graph}"),
        )
    _remark(f"exported to {arguments.bundle} in {time.perf_counter() - start:.1f} s", bar)
    return 0


def _remark(line: str, bar: tqdm[NoReturn]) -> None:
    bar.write(f"flashnext: {line}", file=sys.stderr)
