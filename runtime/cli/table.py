"""Tables and amounts as people read them."""

from __future__ import annotations

from collections.abc import Sequence

KIBI = 1024
KILO = 1000


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first column flush left, the others (figures) flush right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(_line(line, widths) for line in [header, ["-" * w for w in widths], *rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    figures = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *figures]).rstrip()


def amount_of_bytes(count: float) -> str:
    """1536 -> '1.50 KiB'."""
    return _scaled(count, KIBI, ("B", "KiB", "MiB", "GiB", "TiB"))


def amount(count: float) -> str:
    """1234567 -> '1.23 M'."""
    return _scaled(count, KILO, ("", "K", "M", "G", "T"))


def _scaled(count: float, step: int, units: Sequence[str]) -> str:
    unit = 0
    while count >= step and unit < len(units) - 1:
        count, unit = count / step, unit + 1
    figure = f"{count:.0f}" if unit == 0 else f"{count:.3g}" if count >= 100 else f"{count:.2f}"
    return f"{figure} {units[unit]}".rstrip()
