"""How long steps waited for their n-gram rows, and where the rows came from.

Decode steps and chunks of prompts are kept apart: a decode step waits for some rows that nobody could know before, a
chunk for thousands that were fetched while the chunk before it ran.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any

from flashnext.runtime.wait_histogram import WaitHistogram


@dataclass(frozen=True)
class RowCounts:
    """Rows that were gathered, and their bytes as stored; rows that a file had to be read for (`missing`), and those
    that the cache of rows had (`hot`).

    Missing rows are looked for while there are any: of short steps the first one that meets some counts them by its
    thread's page faults. Without native code, only rows and bytes are counted.
    """

    rows: int = 0
    bytes: int = 0
    missing: int = 0
    hot: int = 0

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class RowMetrics:
    """Waits of bodies for their rows, after their heads were started; and what was gathered."""

    decode: WaitHistogram = field(default_factory=WaitHistogram)
    prefill: WaitHistogram = field(default_factory=WaitHistogram)
    counts: RowCounts = RowCounts()
    fetched_ahead: int = 0
    """Chunks whose rows had been asked for before their step began."""
    on_device: bool = False
    """The device gathered: waits are the host's time to queue that. How long a body waited, only the device knows."""

    def add(self, other: RowMetrics) -> None:
        """Take in what another period saw."""
        self.decode.merge(other.decode)
        self.prefill.merge(other.prefill)
        self.counts += other.counts
        self.fetched_ahead += other.fetched_ahead
        self.on_device |= other.on_device

    def facts(self) -> dict[str, Any]:
        """As plain data; waits in milliseconds. Shares of the rows: `hot` came from the cache of rows, for `in_memory`
        no file had to be read (hot ones included)."""
        rows = self.counts.rows
        return {
            "gathered_by": "device" if self.on_device else "host",
            "decode_wait_ms": self.decode.quantiles_ms(),
            "prefill_wait_ms": self.prefill.quantiles_ms(),
            "chunks_fetched_ahead": self.fetched_ahead,
            "rows": rows,
            "bytes": self.counts.bytes,
            "hot": self.counts.hot / rows if rows else 0.0,
            "in_memory": 1 - self.counts.missing / rows if rows else 1.0,
        }
