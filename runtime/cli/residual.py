"""`flashnext residual`: what a checkpoint's residual stream does. The work is `flashnext.calibration.residual`'s."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flashnext.export.progress import progress_bar
from flashnext.runtime.cli.parser import Commands, Parser, output_folder, whole_number
from flashnext.runtime.cli.table import render

DESCRIPTION = """\
Run the PyTorch model over text and say what its residual branches do: how far the gates of each block are open, and of
which earlier writes every block's input is made (an exact decomposition, not an estimate)."""

EXAMPLES = """\
examples:
  flashnext residual CHECKPOINT --text book.txt
  flashnext residual CHECKPOINT --text corpus/ --report out/          a page with plots, and the same as JSON
  flashnext residual CHECKPOINT --text book.txt --against OLDER --report out/
"""

MOST_TOKENS = 1 << 30


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "residual", help="gates and paths of the residual", description=DESCRIPTION, epilog=EXAMPLES, parents=parents
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder in Hugging Face layout")
    add = parser.add_argument
    files = "text, JSONL (each line token ids, a string, or an object with token_ids or text), or a folder of these"
    add("--text", nargs="+", required=True, metavar="PATH", help=files)
    add("--against", metavar="CHECKPOINT", help="compare the paths with those of a second checkpoint")
    add("--report", type=output_folder, metavar="FOLDER", help="write residual.html and residual.json there")
    add("--tokens", type=whole_number(1, MOST_TOKENS), default=8192, metavar="N", help="of text (default: 8,192)")
    add("--length", type=whole_number(1), default=256, metavar="N", help="tokens of a window (default: 256)")
    add("--seed", type=whole_number(0, 1 << 62), default=0, help="chooses the windows (default: 0)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.calibration.residual import diagnose as work
    from flashnext.calibration.residual.paths_page import write

    names = [arguments.checkpoint, *([arguments.against] if arguments.against else [])]
    found = []
    for name in names:
        job = work.Job(name, arguments.text, arguments.tokens, arguments.length, arguments.seed)
        with progress_bar(arguments.tokens, "tokens") as bar:
            found.append(work.diagnose(job, bar.update))
    report = work.build(*found)
    if arguments.report:
        write(report, arguments.report)
    print(json.dumps(report, indent=1) if arguments.json else _summary(report, arguments.report))
    return 0


def _summary(report: dict[str, Any], folder: Path | None) -> str:
    branches = range(report["checkpoint"]["branches"])
    gates = [
        [site, *(f"{v:.2f}" for v in row["write_mean"]), *("" for _ in branches if not row["write_mean"])]
        for site, row in report["gates"].items()
    ]
    lines = [render(["write gates (mean)", *(f"branch {b}" for b in branches)], gates), ""]
    marked = [f"{g['site']}, branch {g['branch']}: {g['kind']} ({g['mean']:.2f})" for g in report["remarkable_gates"]]
    lines.append("Gates below 0.1 or above 1.8: " + ("; ".join(marked) or "none") + ".")
    spans = ", ".join(f"{v:.2f}" for v in report["mean_spans"])
    groups = ", ".join(f"{name}: {share:.1%}" for name, share in report["by_span"].items())
    lines += [f"Mean span by branch: {spans} blocks.", f"Share of inputs by span: {groups}."]
    if report["longest"]:
        path = report["longest"][0]
        lines.append(
            f"Strongest long path: {path['source']} to {path['reader']} ({path['span']} blocks), {path['share']:.1%}."
        )
    if "difference" in report:
        change = ", ".join(f"{name}: {d:+.1%}" for name, d in report["difference"]["by_span"].items())
        lines.append(f"Against {report['against']['checkpoint']['folder']}, by span: {change}.")
    lines.append(
        f"Contributions sum to each input up to {report['sum_error']:.1e} (float64); the float32 model's own inputs "
        f"differ by {report['model_error']:.1e}."
    )
    if folder:
        lines.append(f"The page is {folder / 'residual.html'}.")
    return "\n".join(lines)
