"""HTML pages that need nothing else: no script, no network, no file beside them; and how they are written.

Everything that comes from files has to be escaped by the caller; `table` does it for its cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from flashnext.export.errors import ReportError
from flashnext.export.files import write_whole
from flashnext.export.svg import SERIES_STYLE

STYLE = (
    """
:root { color-scheme: light dark; --ink: #1d2433; --paper: #fdfdfb; --faint: #8886; --cell: #20639b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e4dd; --paper: #16181d; --cell: #7fb8e6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { border-left: 4px solid var(--cell); padding: .6rem 1rem; background: #8881; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; } .chosen { font-weight: 600; }
.wide { overflow-x: auto; } figure { margin: 1.2rem 0; } figcaption { font-weight: 600; font-size: .9rem; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--ink); }
.grid { stroke: var(--faint); } .cell { fill: var(--cell); } .line { fill: none; stroke-width: 1.6; }
.legend span { margin-right: 1.1rem; font-size: .8rem; white-space: nowrap; }
.key { display: inline-block; width: 1.4em; border-top: 3px solid; margin-right: .35em; vertical-align: middle; }
"""
    + SERIES_STYLE
)


def document(title: str, sections: Iterable[str]) -> str:
    """A page of sections that are HTML already."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def table(header: Sequence[str], rows: Iterable[tuple[bool, Sequence[object]]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in header)
    body = "".join(
        f"<tr{' class=chosen' if chosen else ''}>{''.join(f'<td>{escape(str(c))}</td>' for c in cells)}</tr>"
        for chosen, cells in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def write_files(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files into a folder, which is made if need be, each whole or not at all.

    Raises:
        ReportError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text)
    except OSError as cause:
        raise ReportError(
            f"The report cannot be written to {folder} ({cause.strerror}). Name another folder."
        ) from None
    return [folder / name for name in texts]
