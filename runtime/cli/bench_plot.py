"""The picture of `flashnext bench --plot`: one SVG file, with a chart for each figure and a line for each engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashnext.export.errors import RequestError
from flashnext.export.files import write_whole
from flashnext.export.svg import Line, standalone

CHARTS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("milliseconds to the first token, median", lambda row: row["first_token_ms"]["p50"]),
    ("milliseconds per output token, median", lambda row: row["per_token_ms"]["p50"]),
    ("milliseconds per output token, 99 percent below", lambda row: row["per_token_ms"]["p99"]),
    ("tokens per second, all requests together", lambda row: row["tokens_per_second"]),
)


def write_plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loads of every engine into a file, which appears whole or not at all.

    Raises:
        RequestError: the file cannot be written.
    """
    places = list(dict.fromkeys(_place(row) for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    charts = []
    for title, figure in CHARTS:
        found = {(row["engine"], _place(row)): figure(row) for row in rows}
        charts.append((title, [Line(engine, [found.get((engine, place)) for place in places]) for engine in engines]))
    try:
        write_whole(path, standalone("flashnext bench", places, charts))
    except OSError as cause:
        raise RequestError(f"{path} cannot be written ({cause.strerror or cause}). Name another file.") from None


def _place(row: dict[str, Any]) -> str:
    return f"prompt {row['prompt_length']}, batch {row['batch']}"
