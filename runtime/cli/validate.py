"""`flashnext validate`: the graphs of a bundle in any engine against the PyTorch model or saved outputs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flashnext.runtime.cli.engine_options import PROVIDER, add_plan_options, provider
from flashnext.runtime.cli.parser import Commands, Parser, UsageError, number, output_file, whole_number
from flashnext.runtime.cli.table import render
from flashnext.runtime.engines.base import MOST_THREADS

if TYPE_CHECKING:
    from flashnext.runtime.validation.comparison import OutputError, Report

DESCRIPTION = """\
Run every graph of a bundle in one or more engines and in PyTorch on the same seeded steps (a prefill chunk, a decode
step, a verification step and the one after it) and compare every output. With --per-layer, what happens at every
Gated Residual is compared too, and the first block that is wrong is named. Ends with 1 when an error exceeds the
tolerance."""

EXAMPLES = """\
examples:
  flashnext validate BUNDLE
  flashnext validate BUNDLE --per-layer --report out.html     which block differs, and a plot of the error by layer
  flashnext validate BUNDLE --tokens 3000       a prefill above the indexer's budget, so that attention is sparse
  flashnext validate BUNDLE --engine onnxruntime torch:host   several engines, each against PyTorch
  flashnext validate BUNDLE --provider CUDAExecutionProvider  ONNX Runtime on a GPU
  flashnext validate BUNDLE --golden GOLDEN     against outputs that `flashnext golden` saved; needs no PyTorch
  flashnext validate BUNDLE --json > report.json
"""

EXIT_DIFFERS = 1
TOLERANCE_HELP = (
    "largest error that passes, in standard deviations of the output (mean error, with a residual or caches in FP8)"
)


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "validate",
        help="compare a bundle's graphs with the PyTorch model",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        parents=parents,
    )
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder made by `flashnext export`")
    add("--engine", nargs="+", default=["onnxruntime"], metavar="ENGINE", help="what to judge (default: onnxruntime)")
    add("--reference", metavar="ENGINE", help="what is right (default: torch:reference; with --golden: golden)")
    add("--golden", metavar="FOLDER", help="outputs saved by `flashnext golden` take part, on their own steps")
    add("--per-layer", action="store_true", help="compare inside the graphs, and name the block that is wrong")
    add("--report", type=output_file, metavar="FILE", help="write an HTML page with a plot of the error by layer")
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    add_plan_options(add)
    add("--tokens", type=whole_number(1), default=0, help="length of the prefill (default: short)")
    add("--tolerance", type=number, help=TOLERANCE_HELP)
    add("--seed", type=whole_number(0), default=0, help="of the random tokens (default: 0)")
    add("--threads", type=whole_number(1, MOST_THREADS), help="threads of the engines (default: all cores)")
    add("--provider", action="append", type=provider, dest="providers", metavar="NAME[:OPTION=VALUE,…]", help=PROVIDER)
    add("--json", action="store_true", help="print one JSON object")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    _check(arguments)
    from flashnext.runtime.validation import page
    from flashnext.runtime.validation.validator import validate

    names = ["engine", "reference", "golden", "per_layer", "checkpoint", "engine_path", "plugins"]
    names += ["tokens", "tolerance", "seed", "threads", "providers"]
    report = validate(Path(arguments.bundle), **{name: getattr(arguments, name) for name in names})
    if arguments.report:
        page.write(report, arguments.report)
    print(json.dumps(_facts(report), indent=1) if arguments.json else _table(report))
    for note in report.notes:
        print(f"flashnext: {note}", file=sys.stderr)
    if not report.passed:
        failed = sum(not row for row in report.rows)
        print(f"flashnext: {failed} of {len(report.rows)} outputs differ by more than the tolerance.", file=sys.stderr)
        for fault in report.faults:
            print(f"flashnext: {fault}", file=sys.stderr)
    return 0 if report.passed else EXIT_DIFFERS


def _check(arguments: argparse.Namespace) -> None:
    """What would be noticed only after the work."""
    if arguments.golden and (arguments.tokens or arguments.seed):
        raise UsageError("--tokens and --seed choose steps; with --golden the saved ones are run. Leave them out.")


def _facts(report: Report) -> dict[str, object]:
    faults = [
        {
            "engine": fault.row.engine,
            "graph": fault.row.graph,
            "step": fault.row.step,
            "output": fault.row.output,
            "suspect": fault.suspect,
            "rises_at": fault.rise.output if fault.rise else None,
            "rise_suspect": fault.rise_suspect or None,
            "sentence": str(fault),
        }
        for fault in report.faults
    ]
    rows = [{**dataclasses.asdict(row), "relative": row.relative, "passed": bool(row)} for row in report.rows]
    head = {"reference": report.reference, "engines": report.engines, "passed": report.passed, "notes": report.notes}
    return {**head, "faults": faults, "outputs": rows}


def _table(report: Report) -> str:
    """Every output of the graphs; of the sites, for each the step where it is farthest off."""
    from flashnext.runtime.validation.comparison import is_site

    rows = [row for row in report.rows if not is_site(row)]
    judged = "mean" if any(row.by_mean for row in report.rows) else "max"
    header = ["output", "step", "max error", "mean error", "deviation", f"{judged} / deviation", ""]
    text = render(_with_engine(report, header), [_cells(report, row) for row in rows])
    worst: dict[tuple[str, str, str], OutputError] = {}
    for row in report.of_sites():
        key = (row.engine, row.graph, row.output)
        if key not in worst or not row.relative <= worst[key].relative:
            worst[key] = row
    if worst:
        header = ["by layer", "worst step", *header[2:]]
        text += "\n\n" + render(_with_engine(report, header), [_cells(report, row) for row in worst.values()])
    return text


def _with_engine(report: Report, cells: list[str], engine: str = "engine") -> list[str]:
    """The engine's column, where there are several."""
    return [cells[0], engine, *cells[1:]] if len(report.engines) > 1 else cells


def _cells(report: Report, row: OutputError) -> list[str]:
    figures = (row.max_error, row.mean_error, row.deviation, row.relative)
    cells = [f"{row.graph} {row.output}", row.step, *(f"{value:.2e}" for value in figures), "ok" if row else "DIFFERS"]
    return _with_engine(report, cells, row.engine)
