"""Progress bars for people: on a terminal only, and only for what takes longer than two seconds.

with progress_bar(len(items), "weights") as bar:
    for item in items:
        ...
        bar.update()
"""

from __future__ import annotations

import sys
from typing import NoReturn

from tqdm import tqdm

PATIENCE_SECONDS = 2.0


def progress_bar(total: int | None, unit: str) -> tqdm[NoReturn]:
    """A bar on standard error that vanishes when it is done; silent where nobody watches."""
    quiet = not sys.stderr.isatty()
    return tqdm(total=total, unit=f" {unit}", delay=PATIENCE_SECONDS, leave=False, disable=quiet)
