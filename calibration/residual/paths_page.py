"""The report of `flashnext residual` as one HTML page and as JSON: gates, shares of paths, spans.

write(diagnose.build(findings), Path("out"))        # out/residual.html and out/residual.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from flashnext.export.html import document, table, write_files
from flashnext.export.svg import Line, heat_map, line_chart

Report = dict[str, Any]


def write(report: Report, folder: Path) -> list[Path]:
    """Write both forms, each whole or not at all.

    Raises:
        ReportError: the folder cannot be made or written to.
    """
    texts = {"residual.json": json.dumps(report, indent=1, allow_nan=False) + "\n", "residual.html": render(report)}
    return write_files(texts, folder)


def render(report: Report) -> str:
    """The page."""
    sections = [_head(report), _gates(report), _shares(report), _spans(report), _longest(report)]
    if "difference" in report:
        sections.append(_difference(report))
    return document("The residual stream", sections)


def _head(report: Report) -> str:
    checkpoint, text = report["checkpoint"], report["text"]
    facts = (
        f"Checkpoint {checkpoint['folder']} ({checkpoint['identity'][:16]}…): {checkpoint['layers']} layers of "
        f"{checkpoint['hidden_size']:,} channels, {checkpoint['branches']} branches. {text['tokens']:,} tokens in "
        f"windows of {text['length']:,}, seed {text['seed']}, SHA-256 {text['sha256'][:16]}…."
    )
    exact = (
        f"The contributions sum to each block's input up to {report['sum_error']:.1e} of its largest value (float64); "
        f"the inputs of the float32 model differ from that by {report['model_error']:.1e}."
    )
    return f"<p>{escape(facts)}</p><p>{escape(exact)}</p>"


def _gates(report: Report) -> str:
    sites = [name for name, row in report["gates"].items() if row["write_mean"]]
    branches = range(report["checkpoint"]["branches"])
    charts = [
        line_chart(title, sites, [Line(f"branch {b}", [report["gates"][s][key][b] for s in sites]) for b in branches])
        for key, title in (("write_mean", "Mean write gate s of each block"), ("read_mean", "Mean read gate G"))
    ]
    rows = [(False, (g["site"], g["branch"], f"{g['mean']:.3f}", g["kind"])) for g in report["remarkable_gates"]]
    marked = table(["block", "branch", "mean write gate", ""], rows) if rows else ""
    note = "Write gates below 0.1 are called dead, above 1.8 dominating" + (":" if rows else "; there is none.")
    return f"<h2>Gates</h2>{''.join(charts)}<p>{note}</p>{marked}"


def _shares(report: Report) -> str:
    return (
        "<h2>What each block's input is made of</h2>"
        + _map(report, "Share of each source (upwards) in the input of each block (across)", report["shares"])
        + "<p>Share by norm, per token, averaged. Opacity is the share against the largest one.</p>"
    )


def _map(report: Report, title: str, shares: Sequence[Sequence[float]]) -> str:
    places, rows = ([b["name"] for b in report[key]] for key in ("readers", "sources"))
    most = max((v for row in shares for v in row), default=0.0) or 1.0
    return heat_map(title, places, rows, [[max(v, 0.0) / most for v in row] for row in shares])


def _spans(report: Report) -> str:
    branches = [
        (False, (f"branch {b}", f"{share:.1%}", f"{span:.2f}"))
        for b, (share, span) in enumerate(zip(report["branch_shares"], report["mean_spans"], strict=True))
    ]
    groups = [(False, (name, f"{share:.1%}")) for name, share in report["by_span"].items()]
    return (
        "<h2>Spans</h2><p>Blocks from the writer to the reader; 1 is the block just before.</p>"
        + table(["", "share of all inputs", "mean span"], branches)
        + table(["span", "share of an input"], groups)
    )


def _longest(report: Report) -> str:
    rows = [(False, (p["source"], p["reader"], p["span"], f"{p['share']:.1%}")) for p in report["longest"]]
    if not rows:
        return "<h2>Long paths</h2><p>No path spans more than 12 blocks.</p>"
    return f"<h2>Long paths</h2>{table(['from', 'to', 'span', 'share of the input'], rows)}"


def _difference(report: Report) -> str:
    difference, other = report["difference"], report["against"]["checkpoint"]["folder"]
    shares = difference["shares"]
    less = [[-v for v in row] for row in shares]
    rows = [
        (False, (name, f"{report['by_span'][name]:.1%}", f"{report['against']['by_span'][name]:.1%}", f"{change:+.1%}"))
        for name, change in difference["by_span"].items()
    ]
    return (
        f"<h2>Against {escape(other)}</h2>"
        + table(["span", "here", "there", "difference"], rows)
        + _map(report, "Larger here", shares)
        + _map(report, "Larger there", less)
    )
