"""Updates that vanish: writes smaller than half a step of the grid that the branches are stored on.

A branch that holds R moves only if |update| is at least half the distance between R's neighbours on the FP8 grid; with
rounding to nearest a smaller one leaves the stored code as it was, however often it comes. Stochastic rounding keeps
them on average. Counted are channels by number and by energy (the sum of squared updates).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnext.export.ops.reference.residual_store import Format


def half_step(r: Tensor, scale: Tensor, form: Format) -> Tensor:
    """Half the distance between neighbours of the grid at r [..., n, H]; scale [n] or [..., n]."""
    quotient = (r / scale[..., None]).abs().clamp_max(form.largest)
    exponent = torch.where(quotient > 0, torch.frexp(quotient).exponent - 1, form.least_exponent)
    exponent = exponent.clamp_min(form.least_exponent)
    return scale[..., None] * torch.ldexp(torch.ones_like(quotient), exponent - form.mantissa_bits - 1)


class LostUpdates:
    """Running counts for each branch of a store."""

    def __init__(self, branches: int) -> None:
        self.lost, self.updates = (torch.zeros(branches, dtype=torch.float64) for _ in range(2))
        self.lost_energy, self.energy = (torch.zeros(branches, dtype=torch.float64) for _ in range(2))

    def add(self, before: Tensor, after: Tensor, scale: Tensor, form: Format, weights: Tensor | None = None) -> None:
        """Count the updates of branches [..., n, H]; zeros are no updates. `weights` [...] count a token as several."""
        update = after - before
        weight = 1.0 if weights is None else weights.double()[..., None, None]
        lost = (update.abs() < half_step(before, scale, form)) & (update != 0)
        energy = update.double().square() * weight
        over = tuple(i for i in range(update.dim()) if i != update.dim() - 2)
        self.lost += (lost * weight).sum(over)
        self.updates += ((update != 0) * weight).sum(over)
        self.lost_energy += (energy * lost).sum(over)
        self.energy += energy.sum(over)

    def shares(self) -> tuple[list[float], list[float]]:
        """Lost share of each branch, by number and by energy; 0 where nothing was written."""
        return _ratio(self.lost, self.updates), _ratio(self.lost_energy, self.energy)


def _ratio(part: Tensor, whole: Tensor) -> list[float]:
    return torch.where(whole > 0, part / whole.clamp_min(1e-300), 0.0).tolist()
