"""`flashnext validate`: the ONNX graphs of a bundle against the PyTorch model, output by output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flashnext.runtime.cli.parser import Commands, Parser, number, whole_number
from flashnext.runtime.cli.table import render

if TYPE_CHECKING:
    from flashnext.runtime.validate import Report

DESCRIPTION = """\
Run every graph of a bundle in ONNX Runtime and in PyTorch on the same seeded steps (a prefill chunk, a decode step, a
verification step and the one after it) and compare every output. Ends with 1 when an error exceeds the tolerance."""

EXAMPLES = """\
examples:
  flashnext validate my-bundle
  flashnext validate my-bundle --tokens 3000       a prefill above the indexer's budget, so that attention is sparse
  flashnext validate my-bundle --json > report.json
"""

EXIT_DIFFERS = 1
TOLERANCE_HELP = "largest error that passes, in standard deviations of the output (mean error, with a residual in FP8)"


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
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    add("--tokens", type=whole_number(1), default=0, help="length of the prefill (default: short)")
    add("--tolerance", type=number, help=TOLERANCE_HELP)
    add("--seed", type=whole_number(0), default=0, help="of the random tokens (default: 0)")
    add("--threads", type=whole_number(1), help="threads of the engines (default: all cores)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.runtime.validate import validate

    names = ("checkpoint", "tokens", "tolerance", "seed", "threads")
    report = validate(Path(arguments.bundle), **{name: getattr(arguments, name) for name in names})
    print(json.dumps(_facts(report), indent=1) if arguments.json else _table(report))
    if not report.passed:
        failed = sum(not row for row in report.rows)
        print(f"flashnext: {failed} of {len(report.rows)} outputs differ by more than the tolerance.", file=sys.stderr)
    return 0 if report.passed else EXIT_DIFFERS


def _facts(report: Report) -> dict[str, object]:
    rows = [{**dataclasses.asdict(row), "relative": row.relative, "passed": bool(row)} for row in report.rows]
    return {"engine": report.engine, "passed": report.passed, "outputs": rows}


def _table(report: Report) -> str:
    rows = [
        [
            f"{row.graph} {row.output}",
            row.step,
            f"{row.max_error:.2e}",
            f"{row.mean_error:.2e}",
            f"{row.deviation:.2e}",
            f"{row.relative:.2e}",
            "ok" if row else "DIFFERS",
        ]
        for row in report.rows
    ]
    judged = "mean" if any(row.by_mean for row in report.rows) else "max"
    return render(["output", "step", "max error", "mean error", "deviation", f"{judged} / deviation", ""], rows)
