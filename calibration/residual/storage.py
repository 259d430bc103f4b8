"""Ways to store the residual branches, for the simulation in the PyTorch model (`stream.Storage`).

Quantizing is `flashnext.export.ops.reference.residual_store`; here it is only given its scale and its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashnext.export.ops.reference.residual_store import (
    Format,
    StochasticRounding,
    dequantize,
    dynamic_scale,
    quantize,
)

Scales = Mapping[str, Sequence[float]]
"""For each store a scale per branch."""


@dataclass(frozen=True)
class Fp8Storage:
    """Eight bits a value. Without `scales` they are dynamic; with a `seed` rounding is stochastic."""

    form: Format
    stores: tuple[str, ...]
    """all stores of the model in order: a store's index is part of the key of stochastic rounding"""
    scales: Scales | None = None
    seed: int | None = None

    def scale(self, store: str, r: Tensor) -> Tensor:
        """[n] or [..., n]."""
        return dynamic_scale(r, self.form) if self.scales is None else torch.tensor(self.scales[store])

    def rounding(self, store: str, positions: Tensor) -> StochasticRounding | None:
        """The key of the draws; None: to nearest."""
        return None if self.seed is None else StochasticRounding(positions, self.stores.index(store), self.seed)

    def __call__(self, store: str, r: Tensor, positions: Tensor) -> Tensor:
        """Branches [..., n, H] of tokens at positions [...], as they are read back."""
        scale = self.scale(store, r)
        return dequantize(quantize(r, scale, self.form, self.rounding(store, positions)), scale)


def bf16_storage(store: str, r: Tensor, positions: Tensor) -> Tensor:
    """Sixteen bits a value: what the residual is without FP8, rounded to nearest."""
    return r.bfloat16().float()
