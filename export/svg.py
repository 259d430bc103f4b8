"""Plots as SVG text, so that a page needs neither a library nor the network: lines over named places, and heat maps.

Colours come from the page's style sheet (`.series-0` …), so a plot follows light and dark themes. `standalone` makes a
file of its own, which brings the sheet along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 30
COLOURS = 8
"""Series after these repeat the colours with dashes."""
SERIES_STYLE = """\
.series-0 { stroke: #d1495b; border-color: #d1495b; } .series-1 { stroke: #20639b; border-color: #20639b; }
.series-2 { stroke: #3caea3; border-color: #3caea3; } .series-3 { stroke: #e09f3e; border-color: #e09f3e; }
.series-4 { stroke: #7d5ba6; border-color: #7d5ba6; } .series-5 { stroke: #6a994e; border-color: #6a994e; }
.series-6 { stroke: #8a817c; border-color: #8a817c; } .series-7 { stroke: #d16ba5; border-color: #d16ba5; }
"""
FILE_STYLE = """\
svg { --ink: #1d2433; --paper: #fdfdfb; --faint: #8886; font: 11px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e4dd; --paper: #16181d; } }
text { fill: var(--ink); } .paper { fill: var(--paper); } .title { font-weight: 600; font-size: 13px; }
.grid { stroke: var(--faint); } .line { fill: none; stroke-width: 1.6; }
"""


@dataclass(frozen=True)
class Line:
    """A named series: a value for each place on the horizontal axis; None leaves a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class _Axis:
    """From values to heights, linear or by powers of ten."""

    low: float
    high: float
    logarithmic: bool

    def height(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.logarithmic else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            step = max(1, (last - first) // 6)
            return [10.0**e for e in range(first, last + 1, step) if self.low <= 10.0**e * 1.0001 <= self.high * 1.001]
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / 3))
        width = power * next(f for f in (1, 2, 5, 10) if (self.high - self.low) / (power * f) <= 6)
        return [width * i for i in range(math.ceil(self.low / width), math.floor(self.high / width + 1e-9) + 1)]


def _axis(lines: Sequence[Line], logarithmic: bool) -> _Axis:
    values = [v for line in lines for v in line.values if v is not None and (v > 0 or not logarithmic)]
    low, high = min(values, default=0.1 if logarithmic else 0.0), max(values, default=1.0)
    if logarithmic:
        return _Axis(low / 1.2, high * 1.2, True)
    low = min(low, 0.0)
    return _Axis(low, high if high > low else low + 1, False)


def line_chart(title: str, places: Sequence[str], lines: Sequence[Line], logarithmic: bool = False) -> str:
    """Lines over named places (stores or reads, in the model's order), with a legend."""
    names = "".join(
        f'<span><i class="key series-{n % COLOURS}"></i>{escape(line.name)}</span>' for n, line in enumerate(lines)
    )
    return _figure(title, _curves(places, lines, logarithmic), f'<p class="legend">{names}</p>')


def standalone(title: str, places: Sequence[str], charts: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """An SVG file of titled charts, one below the other, over the same places; a point for each value."""
    top, head = 52, 26
    names = list(dict.fromkeys(line.name for _, lines in charts for line in lines))
    across = range(LEFT, LEFT + 150 * len(names), 150)
    parts = [_label(LEFT, 22, title, "start", "title")]
    for number, (x, name) in enumerate(zip(across, names, strict=True)):
        key = f'<line class="line series-{number % COLOURS}" x1="{x}" x2="{x + 20}" y1="38" y2="38"/>'
        parts.append(key + _label(x + 26, 42, name, "start"))
    for number, (caption, lines) in enumerate(charts):
        chart = _label(LEFT, 0, caption, "start", "title") + _curves(places, lines, False, points=True)
        parts.append(f'<g transform="translate(0 {top + head + number * (HEIGHT + head)})">{chart}</g>')
    height = top + len(charts) * (HEIGHT + head)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}"><style>{FILE_STYLE}{SERIES_STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _curves(places: Sequence[str], lines: Sequence[Line], logarithmic: bool, points: bool = False) -> str:
    """Axes and lines; with `points`, a mark for each value."""
    axis = _axis(lines, logarithmic)
    parts = [_grid(axis), _places(places)]
    for number, line in enumerate(lines):
        where = [
            (_across(i, len(places)), axis.height(v))
            for i, v in enumerate(line.values)
            if v is not None and (v > 0 or not logarithmic)
        ]
        dashes = ' stroke-dasharray="6 3"' if number >= COLOURS else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        style = f'class="line series-{number % COLOURS}"'
        parts.append(f'<polyline {style}{dashes} points="{path}"><title>{escape(line.name)}</title></polyline>')
        if points:
            parts += [f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in where]
    return "".join(parts)


def heat_map(
    title: str,
    places: Sequence[str],
    rows: Sequence[str],
    shares: Sequence[Sequence[float]],
    marks: Sequence[Line] = (),
) -> str:
    """Shares 0 … 1 (`shares[place][row]`) as opacity, rows from the bottom up; `marks` are lines in units of rows."""
    height, width = (HEIGHT - TOP - BOTTOM) / len(rows), _step(len(places))
    cells = [
        f'<rect class="cell" x="{_across(p, len(places)) - width / 2:.1f}" '
        f'y="{HEIGHT - BOTTOM - (r + 1) * height:.1f}" width="{width:.1f}" height="{height:.2f}" '
        f'fill-opacity="{value:.3f}"/>'
        for p in range(len(places))
        for r in range(len(rows))
        if (value := shares[p][r]) > 0.0005
    ]
    every = max(1, len(rows) // 8)
    labels = [_label(LEFT - 6, HEIGHT - BOTTOM - (r + 0.5) * height + 4, rows[r]) for r in range(0, len(rows), every)]
    drawn = []
    for number, mark in enumerate(marks):
        points = [
            (_across(i, len(places)), HEIGHT - BOTTOM - min(max(v, 0), len(rows)) * height)
            for i, v in enumerate(mark.values)
            if v is not None
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline class="line series-{number}" points="{path}"/>')
    names = "".join(f'<span><i class="key series-{n}"></i>{escape(m.name)}</span>' for n, m in enumerate(marks))
    return _figure(title, "".join([*cells, *labels, _places(places), *drawn]), f'<p class="legend">{names}</p>')


def _figure(title: str, content: str, legend: str) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{content}</svg>{legend}</figure>'
    )


def _grid(axis: _Axis) -> str:
    out = []
    for tick in axis.ticks():
        y = axis.height(tick)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_label(LEFT - 6, y + 4, f"{tick:g}"))
    return "".join(out)


def _places(places: Sequence[str]) -> str:
    """Names under the axis, as many as there is room for."""
    every = max(1, math.ceil(len(places) / 8))
    return "".join(
        _label(_across(i, len(places)), HEIGHT - BOTTOM + 16, _short(places[i]), "middle")
        for i in range(0, len(places), every)
    )


def _short(name: str) -> str:
    return name.removeprefix("layers.").replace("mtp.layers.0", "mtp")


def _label(x: float, y: float, text: str, anchor: str = "end", kind: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _step(count: int) -> float:
    return (WIDTH - LEFT - RIGHT) / max(count, 1)


def _across(place: int, count: int) -> float:
    return LEFT + (place + 0.5) * _step(count)
