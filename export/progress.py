"""Progress bars for people: on a terminal only, and only for what takes longer than two seconds.

What always takes that long, in few large steps, shows the step under way from the start (`delay=0`).

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


STEP_ONLY = "{desc} [{elapsed}]"


def progress_bar(total: int | None, unit: str, delay: float = PATIENCE_SECONDS) -> tqdm[NoReturn]:
    """A bar on standard error that vanishes when it is done; silent where nobody watches.

    Without a total it shows its description, the step under way, and the time.
    """
    return _bar(total=total, unit=f" {unit}", delay=delay, bar_format=STEP_ONLY if total is None else None)


def byte_bar(total: int, what: str) -> tqdm[NoReturn]:
    """The same for bytes: how many of them, and how many a second."""
    return _bar(total=total, desc=what, unit="B", unit_scale=True, delay=PATIENCE_SECONDS)


def _bar(**settings: Any) -> tqdm[NoReturn]:
    return tqdm(leave=False, disable=not sys.stderr.isatty(), **settings)
