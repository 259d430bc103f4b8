"""`flashnext bench`: time to first token, time per token and throughput of a bundle. The work is in `runtime.bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashnext.export.progress import progress_bar
from flashnext.runtime.cli.bench_plot import write_plot
from flashnext.runtime.cli.engine_options import add_engine_options, engine_options
from flashnext.runtime.cli.ngram_options import add_ngram_options, given_ngram_gather, given_ngram_options
from flashnext.runtime.cli.parser import Commands, Parser, output_file, whole_number
from flashnext.runtime.cli.table import render
from flashnext.runtime.speculation.draft import DRAFTERS

if TYPE_CHECKING:
    from flashnext.runtime.bench import Load
    from flashnext.runtime.model_runner import ModelRunner

DESCRIPTION = """\
Measure a bundle on this machine: requests of equal length arrive at once and are decoded greedily. Each load is run
once to warm up, then measured."""

EXAMPLES = """\
examples:
  flashnext bench BUNDLE
  flashnext bench BUNDLE --prompt-length 128 1024 --batch 1 4 --output-tokens 64
  flashnext bench BUNDLE --text book.txt --draft-tokens 4      prompts from a text, with speculation
  flashnext bench BUNDLE --against transformers                the same loads there, on the same checkpoint
  flashnext bench BUNDLE --batch 1 2 4 --plot bench.svg        a picture of it
"""

MAX_TOKENS = 1 << 20


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "bench", help="latency and throughput", description=DESCRIPTION, epilog=EXAMPLES, parents=parents
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by `flashnext export`")
    add = parser.add_argument_group("load").add_argument
    lengths, batches = whole_number(1, MAX_TOKENS), whole_number(1, 1024)
    add("--prompt-length", type=lengths, nargs="+", default=[128], metavar="N", help="tokens (default: 128)")
    add("--batch", type=batches, nargs="+", default=[1], metavar="N", help="requests at once (default: 1)")
    add("--output-tokens", type=whole_number(2, MAX_TOKENS), default=32, metavar="N", help="of each (default: 32)")
    add("--draft-tokens", type=whole_number(0), default=0, metavar="K", help="guess up to K tokens ahead (default: 0)")
    add("--drafter", choices=DRAFTERS, default="mtp", help="who guesses (default: mtp)")
    add("--text", metavar="FILE", help="prompts from this text, instead of random tokens")
    add("--repeats", type=whole_number(1, 1000), default=3, metavar="N", help="measured runs of each load (default: 3)")
    add = parser.add_argument_group("engine and output").add_argument
    add_engine_options(add)
    add("--against", choices=("transformers",), help="measure this too, on the same checkpoint and prompts")
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=svg_file, metavar="FILE.svg", help="draw the results too")
    add_ngram_options(parser)
    return parser


def svg_file(text: str) -> Path:
    """Converter for the plot's file."""
    if Path(text).suffix != ".svg":
        raise argparse.ArgumentTypeError(f"plots are SVG; name a file such as bench.svg, not {text!r:.80}")
    return output_file(text)


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.runtime.bench import measure, measure_transformers
    from flashnext.runtime.engines.engine_set import EngineOptions
    from flashnext.runtime.model_runner import ModelRunner

    options = EngineOptions(**engine_options(arguments), **given_ngram_gather(arguments))
    where = (arguments.bundle, arguments.engine, arguments.checkpoint)
    runner = ModelRunner.open(*where, options=options, **given_ngram_options(arguments))
    rows: list[dict[str, Any]] = []
    try:
        text, loads = _text(arguments), _loads(arguments, runner)
        with progress_bar(len(loads) * (arguments.repeats + 1), "runs") as bar:
            for load in loads:
                rows.append({"engine": arguments.engine, **measure(runner, load, text, bar.update).facts()})
        if arguments.against:
            folder = Path(arguments.checkpoint or runner.manifest.checkpoint.path)
            for load in loads:
                found = measure_transformers(folder, load, text, arguments.threads)
                rows.append({"engine": arguments.against, **found.facts()})
    finally:
        runner.close()
    print(json.dumps({"loads": rows}) if arguments.json else _table(rows))
    if arguments.plot:
        write_plot(rows, arguments.plot)
    return 0


def _loads(arguments: argparse.Namespace, runner: ModelRunner) -> list[Load]:
    """Every prompt length with every batch; all are checked before the first one runs."""
    from flashnext.runtime.bench import Load
    from flashnext.runtime.request import Request
    from flashnext.runtime.scheduler import Scheduler

    manifest = runner.manifest
    names = ("output_tokens", "draft_tokens", "drafter", "repeats")
    wishes = {name: getattr(arguments, name) for name in names}
    loads = [Load(length, batch, **wishes) for length in arguments.prompt_length for batch in arguments.batch]
    for load in loads:
        Scheduler(manifest.slots, manifest.window, max_batch=load.batch)
        if runner.limits:
            runner.limits.check_sequences(load.batch)
        Request(manifest, [0] * load.prompt_length, load.params(), None)
    return loads


def _text(arguments: argparse.Namespace) -> list[int]:
    from flashnext.export.errors import RequestError
    from flashnext.export.files import read_small_file
    from flashnext.runtime.tokenizer import Tokenizer

    if arguments.text is None:
        return []
    tokenizer = Tokenizer.open(Path(arguments.bundle))
    if tokenizer is None:
        raise RequestError("The bundle has no tokenizer.json, so --text cannot be read. Leave it out.")
    data = read_small_file(Path(arguments.text), RequestError, "text", 64 << 20)
    try:
        tokens = tokenizer.encode(data.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise RequestError(
            f"{arguments.text} is not UTF-8 at byte {cause.start:,}. Convert it (iconv), or give another file."
        ) from None
    if not tokens:
        raise RequestError(f"{arguments.text} holds no text. Give another file, or leave it out for random prompts.")
    return tokens


def _table(rows: list[dict[str, Any]]) -> str:
    header = ["engine", "prompt", "batch", "first token ms", "per token ms p50", "p95", "p99", "tokens/s"]
    header += ["tokens a verification"]
    lines = []
    for row in rows:
        per_token = row["per_token_ms"]
        lines.append([
            row["engine"],
            str(row["prompt_length"]),
            str(row["batch"]),
            f"{row['first_token_ms']['p50']:.1f}",
            *(f"{per_token[q]:.2f}" for q in ("p50", "p95", "p99")),
            f"{row['tokens_per_second']:.1f}",
            f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "",
        ])  # fmt: skip
    return "\n\n".join([render(header, lines), *([_row_table(rows)] if any("ngram_rows" in r for r in rows) else [])])


def _row_table(rows: list[dict[str, Any]]) -> str:
    """What the n-gram rows cost, and where they came from."""
    header = ["n-gram rows of", "batch", "gathered by", "decode wait ms p50", "p99", "chunk wait ms p50", "p99"]
    header += ["chunks ahead", "rows", "MB", "hot", "in memory"]
    lines = []
    for row in rows:
        if "ngram_rows" not in row:
            continue
        facts = row["ngram_rows"]
        waits = [facts[kind][q] for kind in ("decode_wait_ms", "prefill_wait_ms") for q in ("p50", "p99")]
        lines.append([
            f"prompt {row['prompt_length']}",
            str(row["batch"]),
            facts["gathered_by"],
            *(f"{wait:.3f}" for wait in waits),
            str(facts["chunks_fetched_ahead"]),
            f"{facts['rows']:,}",
            f"{facts['bytes'] / 1e6:.1f}",
            f"{facts['hot']:.1%}",
            f"{facts['in_memory']:.1%}",
        ])  # fmt: skip
    return render(header, lines)
