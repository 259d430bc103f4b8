"""Progress bars for people: on a terminal only, and only for what takes longer than two seconds.

with progress_bar(len(items), "weights") as bar:
    for item in items:
        ...
        bar.update()
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from tqdm import tqdm

PATIENCE_SECONDS = 2.0


def progress_bar(total: int | None, unit: str) -> tqdm[NoReturn]:
    """A bar on standard error that vanishes when it is done; silent where nobody watches."""
    return _bar(total=total, unit=f" {unit}")


def byte_bar(total: int, what: str) -> tqdm[NoReturn]:
    """The same for bytes: how many of them, and how many a second."""
    return _bar(total=total, desc=what, unit="B", unit_scale=True)


def _bar(**settings: Any) -> tqdm[NoReturn]:
    return tqdm(delay=PATIENCE_SECONDS, leave=False, disable=not sys.stderr.isatty(), **settings)
