"""Logits as an engine hands them over: arrays, or rows that stay on a device and of which the host has the largest.

A row of the official vocabulary is 1 MB; its 256 largest logits and the sum that makes probabilities of them are 2 KB,
and nearly always all that sampling looks at (shortlist.py says when). So an engine on a device may return `LogitRows`
in place of an array [N, V]; whoever needs a whole row asks for it, before the graph runs again.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
SUM_ERROR = 1e-5
"""Relative error that `LogitRow.sum` may have; plugins/candidates/kernel.cu shows that it has half of it at most."""


class LogitRow(Protocol):
    """One row of logits [V]; `len` is V."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[K] ids of the K largest, best first, ties to the lower id."""

    @property
    def logits(self) -> Floats:
        """[K] their logits."""

    def sum(self, temperature: float) -> float:
        """Of exp((logit - largest) / temperature) over the whole row; NaN if some logit is no number, or the largest is
        infinite. A temperature of 1 costs nothing."""

    def whole(self) -> Floats:
        """All of the row, on the host.

        Raises:
            RuntimeError: the graph has run again.
        """

    def __len__(self) -> int: ...


class LogitRows(Protocol):
    """Rows [N, V]; a part of them, or all of them as an array: `np.asarray(rows)`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, at: int) -> LogitRow: ...
    @overload
    def __getitem__(self, at: slice) -> LogitRows: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]: ...


def whole(logits: Floats | LogitRow) -> Floats:
    """All logits of a row."""
    return logits if isinstance(logits, np.ndarray) else logits.whole()


def likeliest(logits: Floats | LogitRow) -> int:
    """The token with the largest logit, the first of equals."""
    return int(logits.argmax() if isinstance(logits, np.ndarray) else logits.tokens[0])
