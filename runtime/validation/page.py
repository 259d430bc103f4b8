"""A comparison as one HTML page that needs nothing else: verdict, error by layer, and every output.

write(report, Path("out.html"))
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from flashnext.export.html import document, table, write_files
from flashnext.export.svg import Line, line_chart
from flashnext.runtime.validation.comparison import OutputError, Report, is_site

HEADER = ("output", "step", "engine", "max error", "mean error", "deviation", "error / deviation", "tolerance")
NOTE = (
    "Error of what each Gated Residual takes and gives, in standard deviations of the reference, on a logarithmic "
    "scale and in the order in which the model computes: y is a block's output, r the residual branches after it is "
    "written, x the next block's input, s its write gates, start what a graph begins with; 4.attn is the one before "
    "the token mixer of layer 4, 4.mlp the one before its experts, 1.ple an n-gram injection. A sound engine shows a "
    "flat line of rounding; a fault shows as a step at the block that has it."
)


def write(report: Report, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ReportError: it cannot be written there.
    """
    write_files({path.name: render(report)}, path.parent)


def render(report: Report) -> str:
    """The page."""
    return document("Validation report", [_verdict(report), *_charts(report), _outputs(report)])


def _verdict(report: Report) -> str:
    failed = sum(not row for row in report.rows)
    sentence = (
        f"All {len(report.rows):,} outputs agree."
        if report.passed
        else f"{failed:,} of {len(report.rows):,} outputs differ by more than the tolerance."
    )
    lines = [f"<strong>{escape(sentence)}</strong>", *(escape(str(fault)) for fault in report.faults)]
    facts = f"Compared with {report.reference}: {', '.join(report.engines)}."
    notes = "".join(f"<p>{escape(note)}</p>" for note in (facts, *report.notes))
    return f'<p class="verdict">{"<br>".join(lines)}</p>{notes}'


def _charts(report: Report) -> list[str]:
    """Error by layer: a chart for each engine and graph, a line for each step."""
    rows = report.of_sites()
    if not rows:
        return []
    charts = []
    for engine in report.engines:
        for graph in dict.fromkeys(row.graph for row in rows):
            mine = [row for row in rows if (row.engine, row.graph) == (engine, graph)]
            charts.append(_chart(f"{engine}, graph {graph}", mine))
    return ["<h2>Error by layer</h2>", *charts, f"<p>{escape(NOTE)}</p>"]


def _chart(title: str, rows: Sequence[OutputError]) -> str:
    places = list(dict.fromkeys(row.output for row in rows))
    steps = dict.fromkeys(row.step for row in rows)
    found = {(row.step, row.output): row.relative for row in rows}
    lines = [Line(step, [found.get((step, place)) for place in places]) for step in steps]
    tolerance = rows[0].tolerance if rows else None
    named = [_short(place) for place in places]
    return line_chart(title, named, [*lines, Line("tolerance", [tolerance] * len(places))], logarithmic=True)


def _short(output: str) -> str:
    """A site's output as there is room for it under the plot: `layers.4.attn.r`, `final.x`."""
    return output.replace("hyper_connection_mixer", "final").replace("_hyper_connection", "")


def _outputs(report: Report) -> str:
    """The graphs' own outputs, and of the sites those that differ."""
    shown = [row for row in report.rows if not is_site(row) or not row]
    body = table(HEADER, ((not row, _cells(row)) for row in shown))
    return f"<h2>Outputs</h2>{body}<p>Those in bold differ by more than the tolerance.</p>"


def _cells(row: OutputError) -> tuple[str, ...]:
    figures = (row.max_error, row.mean_error, row.deviation, row.relative, row.tolerance)
    return (f"{row.graph} {row.output}", row.step, row.engine, *(f"{value:.2e}" for value in figures))
