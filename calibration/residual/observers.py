"""Statistics of the residual branches on calibration text: for each store and branch, in memory that is fixed.

    statistics = Statistics(config)
    for batch in windows.batches(4):
        model.run(batch, statistics, logits=False, drafts=True)

Nothing here grows with the number of batches: counts, maxima, sums, and two histograms with bins known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashnext.calibration.residual import histogram
from flashnext.calibration.residual.lost_updates import LostUpdates
from flashnext.calibration.residual.stream import Listener, Read, Store
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CalibrationError
from flashnext.export.ops.reference.residual_store import FORMATS, dynamic_scale
from flashnext.export.residual_scales import store_names

PERCENTILES = (99.9, 99.99, 99.999)
OUTLIER_FACTOR = 6.0
"""A channel is an outlier when its root mean square is this many times the median channel's of its branch."""


class StoreStatistics:
    """What is known of one store; every tensor has one row per branch."""

    def __init__(self, branches: int, channels: int) -> None:
        self.tokens = 0
        self.channel_max = torch.zeros(branches, channels)
        self.channel_energy = torch.zeros(branches, channels, dtype=torch.float64)
        self.values = torch.zeros(branches, histogram.BINS, dtype=torch.int64)
        self.token_maxima = torch.zeros(branches, histogram.BINS, dtype=torch.int64)
        self.lost = {name: LostUpdates(branches) for name in FORMATS}
        """with dynamic scales, which are known at once; with static ones the sample tells (`search.py`)"""

    def add(self, before: Tensor | None, after: Tensor) -> None:
        """Take in branches [..., n, H] before and after a write; nothing is written where branches start."""
        by_branch = after.flatten(0, -3).transpose(0, 1).abs()  # [n, T, H]
        self.tokens += by_branch.shape[1]
        self.channel_max = torch.maximum(self.channel_max, by_branch.amax(1))
        self.channel_energy += by_branch.double().square().sum(1)
        self.values += histogram.count(by_branch)
        self.token_maxima += histogram.count(by_branch.amax(-1))
        if before is not None:
            for name, form in FORMATS.items():
                self.lost[name].add(before, after, dynamic_scale(after, form), form)

    def largest(self) -> list[float]:
        """[n] running maxima."""
        return self.channel_max.amax(-1).tolist()

    def rms(self) -> list[float]:
        """[n] root mean squares over tokens and channels."""
        mean = self.channel_energy.mean(-1) / max(self.tokens, 1)
        return mean.sqrt().tolist()

    def percentiles(self, percent: float) -> list[float]:
        """[n] magnitudes that `percent` of the values do not exceed, never above the maximum."""
        return self._percentiles(self.values, percent)

    def token_percentiles(self, percent: float) -> list[float]:
        """[n] the same for the largest magnitude of each token."""
        return self._percentiles(self.token_maxima, percent)

    def outlier_channels(self, most: int = 8) -> list[list[tuple[int, float]]]:
        """For each branch the channels whose root mean square is far above the median channel's, and how many times."""
        rms = self.channel_energy.sqrt()
        ratio = rms / rms.median(-1, keepdim=True).values.clamp_min(1e-300)
        best = ratio.topk(min(most, ratio.shape[-1]), dim=-1)
        return [
            [(c, v) for c, v in zip(channels, values, strict=True) if v > OUTLIER_FACTOR]
            for channels, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def occupied(self, branch: int) -> tuple[list[int], list[int]]:
        """Histogram of a branch as (exponents of two, counts), an octave each, from the first to the last in use."""
        octaves = self.values[branch].view(-1, histogram.PARTS).sum(-1)
        used = octaves.nonzero().flatten().tolist()
        span = range(used[0], used[-1] + 1) if used else range(0)
        return [o - 127 for o in span], [int(octaves[o]) for o in span]

    def _percentiles(self, counts: Tensor, percent: float) -> list[float]:
        rows: NDArray[np.int64] = counts.numpy()
        largest = self.largest()
        return [min(histogram.percentile(row, percent), most) for row, most in zip(rows, largest, strict=True)]


class Statistics(Listener):
    """Statistics of all stores of a model."""

    def __init__(self, config: ModelConfig) -> None:
        self.stores = {name: StoreStatistics(config.hc_count, config.hidden_size) for name in store_names(config)}

    def store(self, event: Store) -> None:
        self.stores[event.name].add(event.before, event.after)


class FiniteCheck(Listener):
    """Stops the run at the first value that is not finite, and says where it is.

    A read comes before the store of the same branches, so the first block whose input is bad is named; the values
    before it (embedding, a block's output y, gates s) tell whose fault it is.
    """

    def begin(self, tokens: NDArray[np.int32]) -> None:
        self._tokens = tokens

    def read(self, event: Read) -> None:
        self._check(event.site, "the residual that is read for", event.r)
        self._check(event.site, "the input of", event.x)

    def store(self, event: Store) -> None:
        if event.y is not None:
            self._check(event.name, "the block output that is written at", event.y)
        self._check(event.name, "the residual at", event.after)

    def _check(self, site: str, what: str, values: Tensor) -> None:
        finite = torch.isfinite(values)
        if bool(finite.all()):
            return
        place = (~finite).nonzero()[0].tolist()
        row, position = place[:2]
        branch = f", branch {place[2]}" if values.dim() == 4 else ""
        raise CalibrationError(
            f"The model is not finite: {what} {site} has {values[tuple(place)].item()} at token {position} of a window "
            f"(id {int(self._tokens[row, position])}){branch}, channel {place[-1]}. Check this layer's weights; scales "
            "cannot be found for such a model."
        )


class Several(Listener):
    """Passes every event on to several listeners, in order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def begin(self, tokens: NDArray[np.int32]) -> None:
        for listener in self._listeners:
            listener.begin(tokens)

    def read(self, event: Read) -> None:
        for listener in self._listeners:
            listener.read(event)

    def store(self, event: Store) -> None:
        for listener in self._listeners:
            listener.store(event)
