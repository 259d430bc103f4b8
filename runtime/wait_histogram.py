"""Short times in power-of-two buckets of microseconds: what every step may add to without growing anything."""

from __future__ import annotations

import math

BUCKETS = 32


class WaitHistogram:
    """Bucket i counts times below 2^i microseconds that are not in bucket i - 1."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.counts[min(int(seconds * 1e6).bit_length(), BUCKETS - 1)] += 1

    def merge(self, other: WaitHistogram) -> None:
        """Add the times of another histogram."""
        self.seconds += other.seconds
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]

    def quantiles_ms(self) -> dict[str, float]:
        """Milliseconds that 50, 95 and 99 percent of the times do not reach."""
        return {f"p{q}": self.quantile(q / 100) * 1e3 for q in (50, 95, 99)}

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Seconds that this share of the times do not reach: the upper edge of a bucket; 0 without any time."""
        wanted = math.ceil(share * self.count)
        reached = 0
        for bucket, count in enumerate(self.counts):
            reached += count
            if count and reached >= wanted:
                return (1 << bucket) / 1e6
        return 0.0
