"""Histograms of magnitudes with logarithmic bins, exact to count and cheap to make.

The bin of a float32 is its exponent and the first `PART_BITS` bits of its mantissa: every octave is cut into 32 equal
parts, and no range has to be known beforehand. A bin is between 1.6 and 3.1% of its values wide, so a percentile,
given as its bin's upper edge, is at most 3.2% too large and never too small. Memory is fixed: 8,192 counts a histogram.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PART_BITS = 5
PARTS = 1 << PART_BITS
BINS = PARTS << 8
_SHIFT = 23 - PART_BITS
_NO_SIGN = 0x7FFFFFFF


def count(magnitudes: Tensor) -> Tensor:
    """Counts int64 [rows, BINS] of values [rows, ...] (signs are ignored); NaN and infinities are not expected."""
    rows = magnitudes.shape[0]
    bits = magnitudes.contiguous().view(torch.int32).flatten(1)
    bins = ((bits & _NO_SIGN) >> _SHIFT) + torch.arange(rows, dtype=torch.int32)[:, None] * BINS
    return torch.bincount(bins.flatten(), minlength=rows * BINS).view(rows, BINS)


def upper_edges() -> NDArray[np.float32]:
    """[BINS] upper edge of each bin: the lower edge of the next."""
    return (np.arange(1, BINS + 1, dtype=np.uint32) << _SHIFT).view(np.float32)


def percentile(counts: NDArray[np.int64], percent: float) -> float:
    """A magnitude that at least `percent` of the counted values [BINS] do not exceed: the upper edge of the bin in
    which the value of that rank lies; 0 for an empty histogram and for zeros."""
    total = int(counts.sum())
    if total == 0:
        return 0.0
    rank = max(int(np.ceil(total * percent / 100)), 1)
    place = int(np.searchsorted(counts.cumsum(), rank))
    return 0.0 if place == 0 else float(upper_edges()[place])
