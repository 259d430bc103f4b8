"""`flashnext calibrate`: scales for an FP8 residual from text. The work is done by `flashnext.calibration.residual`."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from flashnext.export.progress import progress_bar
from flashnext.export.residual_scales import FORMATS, check_replaceable
from flashnext.runtime.cli.parser import Commands, Parser, UsageError, output_file, output_folder, whole_number
from flashnext.runtime.cli.table import render

if TYPE_CHECKING:
    from tqdm import tqdm

    from flashnext.calibration.residual.calibrate import Result

DESCRIPTION = """\
Find the scales with which the residual stream of a checkpoint is stored in FP8: the PyTorch model runs over text once,
and for each store and branch a scale is chosen by the method. The file goes to `flashnext export --residual fp8`. With
--report the model is also run over held-out text under every way of storing the residual, and a page shows what each of
them costs, with a recommendation."""

EXAMPLES = """\
examples:
  flashnext calibrate CHECKPOINT --text corpus/ --out scales.json
  flashnext calibrate CHECKPOINT --text train.jsonl --held-out test.txt --out scales.json --report out/
  flashnext calibrate CHECKPOINT --text ids.jsonl --out scales.json --method percentile-99.99 --tokens 200000
"""

METHODS = ("max", "percentile-99.9", "percentile-99.99", "percentile-99.999", "mse", "input")
MOST_TOKENS = 1 << 30


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "calibrate", help="scales for an FP8 residual", description=DESCRIPTION, epilog=EXAMPLES, parents=parents
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder in Hugging Face layout")
    add = parser.add_argument_group("files").add_argument
    files = "text, JSONL (each line token ids, a string, or an object with token_ids or text), or a folder of these"
    add("--text", nargs="+", required=True, metavar="PATH", help=files)
    add("--out", type=output_file, required=True, metavar="FILE", help="the scales, as JSON")
    add("--report", type=output_folder, metavar="FOLDER", help="write report.html and report.json there")
    add("--held-out", nargs="+", metavar="PATH", help="text for the report (default: a part of --text left out)")
    add = parser.add_argument_group("scales").add_argument
    add("--method", choices=METHODS, default="input", help="how a static scale is chosen (default: input)")
    add("--mode", choices=("static", "dynamic"), default="static", help="dynamic: a scale for each token, none stored")
    add("--format", choices=tuple(FORMATS), default="e4m3", help="8-bit format (default: e4m3)")
    add = parser.add_argument_group("amount").add_argument
    add("--tokens", type=whole_number(1, MOST_TOKENS), default=65_536, metavar="N", help="of text (default: 65,536)")
    add("--held-out-tokens", type=whole_number(1, MOST_TOKENS), default=16_384, metavar="N", help="(default: 16,384)")
    add("--length", type=whole_number(1), default=512, metavar="N", help="tokens of a window (default: 512)")
    add("--seed", type=whole_number(0, 1 << 62), default=0, help="chooses windows and sampled tokens (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    _check_paths(arguments)
    from flashnext.calibration.residual import page, report
    from flashnext.calibration.residual.calibrate import Job, calibrate, facts_of

    names = ("checkpoint", "text", "method", "mode", "tokens", "held_out_tokens", "length", "seed")
    job = Job(
        **{name: getattr(arguments, name) for name in names},
        held_out=arguments.held_out or (),
        form=arguments.format,
        report=arguments.report is not None,
    )
    start = time.perf_counter()
    with progress_bar(None, "steps", delay=0) as bar:
        result = calibrate(job, _Progress(bar))
    result.scales.write(arguments.out)
    facts = {**facts_of(result), "seconds": round(time.perf_counter() - start, 1)}
    if result.findings is not None:
        data = report.build(result.findings)
        page.write(data, arguments.report)
        facts |= {key: data[key] for key in ("recommendation", "maximum", "quality")}
    print(json.dumps(facts, indent=1) if arguments.json else _summary(result, facts, arguments))
    return 0


def _check_paths(arguments: argparse.Namespace) -> None:
    """Before anything slow happens: the outputs have a place."""
    if arguments.held_out and not arguments.report:
        raise UsageError("--held-out is text for the report; add --report FOLDER.")
    check_replaceable(arguments.out)


class _Progress:
    """Shows stages and steps on a bar whose length becomes known on the way."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def start(self, steps: int) -> None:
        self._bar.bar_format = None
        self._bar.reset(total=steps)

    def stage(self, what: str) -> None:
        self._bar.set_description(what)

    def step(self) -> None:
        self._bar.update()


def _summary(result: Result, facts: dict[str, Any], arguments: argparse.Namespace) -> str:
    text, lines = facts["text"], []
    if result.findings is not None:
        rows = [
            [q.name, f"{q.loss:.4f}", f"{q.loss_difference:+.4f}", f"{q.divergence:.5f}", f"{q.agreement:.2%}",
             f"{q.greedy_mean:.1f}"]
            for q in result.findings.quality
        ]  # fmt: skip
        lines = [render(["residual stored as", "loss", "difference", "KL", "same token", "greedy"], rows), ""]
        lines += [facts["recommendation"]["sentence"], facts["maximum"]["sentence"]]
        lines.append(f"The report is {arguments.report / 'report.html'}.")
    kind = f"{facts['stores']} stores, method {facts['method']}" if facts["mode"] == "static" else "dynamic scales"
    lines.append(f"Wrote {arguments.out}: {facts['format']}, {kind}, from {text['tokens']:,} tokens "
                 f"(windows of {text['length']:,}, seed {text['seed']}).")  # fmt: skip
    return "\n".join(lines)
