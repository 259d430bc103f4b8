"""The report as one HTML page that needs nothing else: no script, no network, no file beside it.

    write(report, Path("out"))            # out/report.html and out/report.json, from `report.build`

The page is made of the JSON data alone, so both say the same. Everything that comes from files is escaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from flashnext.export.html import document, table, write_files
from flashnext.export.residual_scales import FORMATS
from flashnext.export.svg import Line, heat_map, line_chart

Report = dict[str, Any]
SMALLEST_NORMAL = 2.0**-6
"""Of e4m3, in units of the scale."""


def write(report: Report, folder: Path) -> list[Path]:
    """Write both forms of the report, each whole or not at all.

    Raises:
        ReportError: the folder cannot be made or written to.
    """
    texts = {"report.json": json.dumps(report, indent=1, allow_nan=False) + "\n", "report.html": render(report)}
    return write_files(texts, folder)


def render(report: Report) -> str:
    """The page."""
    sections = [_head(report), _quality(report), _depth(report), _ranges(report), _lost(report), _scales(report)]
    return document("FP8 residual: calibration report", sections)


def _head(report: Report) -> str:
    checkpoint, verdict = report["checkpoint"], report["recommendation"]
    texts = [
        f"{name}: {text['tokens']:,} tokens in windows of {text['length']:,}, seed {text['seed']}, SHA-256 "
        f"{text['sha256'][:16]}…"
        for name, text in (("Calibration", report["text"]), ("Held out", report["held_out"]))
    ]
    facts = (
        f"Checkpoint {checkpoint['folder']} ({checkpoint['identity'][:16]}…): {checkpoint['layers']} layers of "
        f"{checkpoint['hidden_size']:,} channels, {checkpoint['branches']} branches. {texts[0]}. {texts[1]}."
    )
    return (
        f'<p class="verdict"><strong>{escape(verdict["sentence"])}</strong></p><p>Rule: {escape(verdict["rule"])}</p>'
        f"<p>{escape(report['maximum']['sentence'])}</p><p>{escape(facts)}</p>"
    )


def _quality(report: Report) -> str:
    header = ["residual stored as", "loss", "difference", "± error", "perplexity", "KL", "same top token",
              f"equal greedy tokens (of {report['greedy']['written_tokens']})"]  # fmt: skip
    chosen = report["recommendation"]["way"]
    rows = [(q["name"] == chosen, _figures(q)) for q in report["quality"]]
    note = (
        "Loss and KL in nats per token; the difference and its standard error are over windows, from the first line. "
        "Greedy: tokens of the first line's greedy text that are written too before the first other one, mean over "
        "prompts."
    )
    return f"<h2>Quality on held-out text</h2>{table(header, rows)}<p>{note}</p>"


def _figures(q: dict[str, Any]) -> tuple[str, ...]:
    """A line of the quality table."""
    return (
        q["name"],
        f"{q['loss']:.4f}",
        f"{q['loss_difference']:+.4f}",
        f"{q['standard_error']:.4f}",
        f"{q['perplexity']:.3f}",
        f"{q['divergence']:.5f}",
        f"{q['agreement']:.2%}",
        f"{q['greedy_mean']:.1f}",
    )


def _depth(report: Report) -> str:
    ways = report["quality"][1:]
    sites = list(ways[0]["input_errors"])
    lines = [Line(q["name"], [q["input_errors"][s] for s in sites]) for q in ways]
    chart = line_chart("Relative error of each block's input", sites, lines, logarithmic=True)
    return (
        f"<h2>Error by depth</h2>{chart}<p>Root of the squared error over the square of the block's input x, against "
        "the unquantized model on the same held-out text: all roundings up to there have added up.</p>"
    )


def _ranges(report: Report) -> str:
    stores, scales = report["stores"], report["scales"]
    names, method = list(stores), _method(report)
    maps = []
    for branch in range(report["checkpoint"]["branches"]):
        exponents = [e for s in stores.values() for e in s["octaves"][branch]["exponents"]]
        low = max(min(exponents, default=0), max(exponents, default=0) - 40)
        high = max(exponents, default=0)
        shares = [_shares(s["octaves"][branch], low, high) for s in stores.values()]
        steps = [scales[method][name][branch] for name in names]
        marks = [
            Line("largest value", _rows([s["max"][branch] for s in stores.values()], low)),
            Line(f"largest code ({method})", _rows([v * FORMATS["e4m3"] for v in steps], low)),
            Line("smallest normal code", _rows([v * SMALLEST_NORMAL for v in steps], low)),
            Line("root mean square", _rows([s["rms"][branch] for s in stores.values()], low)),
        ]
        rows = [f"2^{e}" for e in range(low, high + 1)]
        title = f"Magnitudes of branch {branch} at each store"
        maps.append(heat_map(title, names, rows, shares, marks))
    return f"<h2>Range of the branches</h2>{''.join(maps)}{_outliers(report)}"


def _shares(octaves: dict[str, list[int]], low: int, high: int) -> list[float]:
    """Share of each octave of low … high, as opacity: the fullest is 1."""
    found = dict(zip(octaves["exponents"], octaves["counts"], strict=True))
    most = max(found.values(), default=1)
    return [math.sqrt(found.get(e, 0) / most) for e in range(low, high + 1)]


def _rows(values: Sequence[float], low: int) -> list[float | None]:
    """Magnitudes in units of the map's rows."""
    return [math.log2(v) - low if v > 0 else None for v in values]


def _outliers(report: Report) -> str:
    found = [
        (name, branch, c["channel"], f"{c['times_median']:.1f}")
        for name, store in report["stores"].items()
        for branch, channels in enumerate(store["outlier_channels"])
        for c in channels
    ]
    found.sort(key=lambda row: -float(row[3]))
    if not found:
        return "<p>No channel's root mean square is six times its branch's median or more.</p>"
    header = ["store", "branch", "channel", "times the median channel"]
    more = f"<p>The largest 20 of {len(found)}.</p>" if len(found) > 20 else ""
    return f"<h3>Outlier channels</h3>{table(header, ((False, row) for row in found[:20]))}{more}"


def _lost(report: Report) -> str:
    method = _method(report)
    lost = report["lost"][method]
    names = [n for n, shares in lost.items() if any(shares["by_energy"]) or any(shares["by_number"])]
    charts = [
        line_chart(
            f"Share of updates lost, by {what} ({method})",
            names,
            [
                Line(f"branch {b}", [lost[n][f"by_{what}"][b] for n in names])
                for b in range(report["checkpoint"]["branches"])
            ],
        )
        for what in ("number", "energy")
    ]
    note = (
        "An update s y is lost where it is smaller than half a step of the e4m3 grid at R: rounding to nearest leaves "
        "the stored code as it was. By number counts channels, by energy their squares. Sampled calibration tokens."
    )
    return f"<h2>Lost updates</h2>{''.join(charts)}<p>{note}</p>"


def _scales(report: Report) -> str:
    methods = list(report["input_errors"])
    rows = [
        (False, (f"{store}, branch {branch}", *(f"{report['input_errors'][m][store][branch]:.4f}" for m in methods)))
        for store in report["stores"]
        for branch in range(report["checkpoint"]["branches"])
    ]
    all_stores = table(["store and branch", *methods], rows)
    return (
        "<h2>Error of the next block's input</h2><p>Relative, when this branch alone is rounded to e4m3 at this store, "
        f"by method, on sampled calibration tokens.</p><details><summary>All stores</summary>{all_stores}</details>"
    )


def _method(report: Report) -> str:
    """The static method that the plots show: the recommended one, or block input."""
    name = str(report["recommendation"]["way"]).removeprefix("e4m3 static ")
    return name if name in report["scales"] else "input"
