"""Static scales for a store and branch, by one of several methods, and what each of them costs.

    max             the largest magnitude becomes the format's largest value
    percentile-P    the magnitude that P percent of the values do not exceed does; the rest saturates
    mse             least squared error of the branch itself
    input           least squared error of the next block's input x, after norm and gates: what the model sees

FP8 is a floating-point format: within its 2^15 (e4m3) or 2^30 (e5m2) of normal range a smaller scale gains nothing, so
maximum is as good as any method until outliers push typical values out of that range. Squared error of the branch is
ruled by the tokens with the largest values; x is normalised, so every token counts alike there, and a method that looks
at x gives up one token where that serves thousands.

Candidates are scales from the maximum's on down, an octave apart, as long as typical tokens are not cut off, then
quarters of an octave around the best one. Among scales whose error is within `INDIFFERENT` of the least the largest is
taken: it has the most room for values that the text did not show. One branch is rounded at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnext.calibration.residual.lost_updates import LostUpdates
from flashnext.calibration.residual.observers import PERCENTILES, Statistics
from flashnext.calibration.residual.sample import Tokens, TokenSample
from flashnext.calibration.residual.storage import Scales
from flashnext.export.ops.reference.residual_store import (
    E4M3,
    Format,
    StochasticRounding,
    dequantize,
    dynamic_scale,
    quantize,
)
from flashnext.export.residual_scales import SMALLEST_SCALE

PERCENTILE = "percentile-"
METHODS = ("max", *(f"{PERCENTILE}{p}" for p in PERCENTILES), "mse", "input")
INDIFFERENT = 1.01
FINER = (0.75, 0.5, 0.25, -0.25, -0.5, -0.75)
"""Octaves around the best whole one."""

Error = Callable[[Tokens, int, Tensor], float]
"""(tokens, branch, scale [1] or [N, 1]) -> relative error"""


@dataclass(frozen=True)
class Rounding:
    """How values become codes: a format, to nearest or (with a seed) stochastically, at the store number `site`."""

    form: Format = E4M3
    seed: int | None = None
    site: int = 0

    def change(self, tokens: Tokens, branch: int, scale: Tensor) -> Tensor:
        """rounded(r) - r of one branch: [N, H]."""
        own = slice(branch, branch + 1)
        if self.seed is None:
            codes = quantize(tokens.r[:, own], scale, self.form)
        else:  # the draws depend on the branch's number, so all branches are rounded and one is kept
            key = StochasticRounding(tokens.positions, self.site, self.seed)
            codes = quantize(tokens.r, scale.expand(*scale.shape[:-1], tokens.r.shape[1]), self.form, key)[:, own]
        return (dequantize(codes, scale) - tokens.r[:, own])[:, 0]

    def error_of_values(self, tokens: Tokens, branch: int, scale: Tensor) -> float:
        """Root of the squared error of the branch over its square, weighted."""
        return _relative(self.change(tokens, branch, scale), tokens.r[:, branch], tokens.weights)

    def error_of_input(self, tokens: Tokens, branch: int, scale: Tensor) -> float:
        """The same of what the next block sees; 0 where nothing reads the store."""
        if tokens.reader is None or tokens.following is None:
            return 0.0
        changed = tokens.following.clone()
        changed[:, branch] += self.change(tokens, branch, scale)
        x = tokens.reader(tokens.following)
        return _relative(tokens.reader(changed) - x, x, tokens.weights)


def best_scale(tokens: Tokens, branch: int, largest: float, form: Format, error: Error) -> float:
    """The scale of least error for a branch whose largest magnitude on the whole text is `largest`."""
    top = scale_of(largest, form)
    typical = float(tokens.r[:, branch].abs().amax(-1).median())
    octaves = math.ceil(math.log2(largest / typical)) + 1 if largest > 0 and typical > 0 else 0
    errors = {float(o): error(tokens, branch, _at(top, o)) for o in range(octaves + 1)}
    best = min(errors, key=errors.__getitem__)
    errors |= {best - f: error(tokens, branch, _at(top, best - f)) for f in FINER if best - f > 0}
    least = min(errors.values())
    return float(_at(top, min(o for o, e in errors.items() if e <= least * INDIFFERENT)))


def scale_of(magnitude: float, form: Format) -> float:
    """The scale by which a magnitude becomes the format's largest value; 1 for a branch of zeros, as dynamic scales."""
    if magnitude <= 0:
        return 1.0
    return float(torch.tensor(max(magnitude / form.largest, SMALLEST_SCALE), dtype=torch.float32))


def _at(top: float, octaves: float) -> Tensor:
    return torch.tensor([max(top * 2.0**-octaves, SMALLEST_SCALE)])


def _relative(error: Tensor, value: Tensor, weights: Tensor) -> float:
    """sqrt(sum w |error|^2 / sum w |value|^2) over tokens [N, C]; 0 when there is no value."""
    squares = [(weights * part.double().square().sum(-1)).sum().item() for part in (error, value)]
    return math.sqrt(squares[0] / squares[1]) if squares[1] > 0 else 0.0


class ScaleSearch:
    """Scales of all stores of a model, from its statistics and sample."""

    def __init__(self, statistics: Statistics, sample: TokenSample, form: Format, seed: int | None = None) -> None:
        self.statistics, self.sample, self.form, self.seed = statistics, sample, form, seed
        self.stores = tuple(statistics.stores)
        self.branches = len(next(iter(statistics.stores.values())).largest())

    def scales(self, method: str, done: Callable[[], object] = lambda: None) -> dict[str, tuple[float, ...]]:
        """Scales [n] of every store by a method of `METHODS`; `done` is called after each store."""
        out = {}
        for store in self.stores:
            out[store] = self._of_store(method, store)
            done()
        return out

    def errors(self, scales: Scales | None) -> dict[str, list[float]]:
        """Relative error of the next block's input when one branch of a store is rounded, [n] for each store; None
        stands for dynamic scales."""
        return {s: [self._error(s, b, scales) for b in range(self.branches)] for s in self.stores}

    def lost(self, scales: Scales) -> dict[str, tuple[list[float], list[float]]]:
        """Shares of the updates that are lost with these scales, by number and by energy, [n] for each store."""
        return {store: self._lost(store, scales[store]) for store in self.stores}

    def _of_store(self, method: str, store: str) -> tuple[float, ...]:
        found = self.statistics.stores[store]
        if method == "max":
            return tuple(scale_of(v, self.form) for v in found.largest())
        if method.startswith(PERCENTILE):
            return tuple(scale_of(v, self.form) for v in found.percentiles(float(method.removeprefix(PERCENTILE))))
        rounding = self._rounding(store)
        error = {"mse": rounding.error_of_values, "input": rounding.error_of_input}[method]
        return tuple(
            best_scale(self.sample.of(store, branch), branch, largest, self.form, error)
            for branch, largest in enumerate(found.largest())
        )

    def _error(self, store: str, branch: int, scales: Scales | None) -> float:
        tokens = self.sample.of(store, branch)
        if scales is None:
            scale = dynamic_scale(tokens.r[:, branch : branch + 1], self.form)
        else:
            scale = torch.tensor([scales[store][branch]])
        return self._rounding(store).error_of_input(tokens, branch, scale)

    def _lost(self, store: str, scales: Sequence[float]) -> tuple[list[float], list[float]]:
        shares = []
        for branch, scale in enumerate(scales):
            tokens, lost, own = self.sample.of(store, branch), LostUpdates(1), slice(branch, branch + 1)
            if tokens.before is not None:
                r = (tokens.before[:, own], tokens.r[:, own])
                lost.add(*r, torch.tensor([scale]), self.form, tokens.weights)
            shares.append([share[0] for share in lost.shares()])
        number, energy = zip(*shares, strict=True)
        return list(number), list(energy)

    def _rounding(self, store: str) -> Rounding:
        return Rounding(self.form, self.seed, self.stores.index(store))
