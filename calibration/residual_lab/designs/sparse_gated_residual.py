"""The Gated Residual with sparse writes: a token writes to the two branches whose gates are largest, and to no other.

It saves half of the stores. Freedom taken: gates keep their values (they are not made to add up to what four were),
only chosen gates get a gradient, and W_inject starts with small values instead of zeros, since with equal gates every
token would choose the same two branches and the others would never be written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashnext.calibration.residual_lab.designs.base import Shape, drawn
from flashnext.calibration.residual_lab.designs.gated_residual import GatedResidual

WRITTEN = 2


class SparseGatedResidual(GatedResidual):
    """State as in `GatedResidual`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for block in range(shape.blocks):
            self.gates_of(block).inject = drawn(shape.branches, shape.branches * shape.hidden)

    def write_gates(self, s: Tensor) -> Tensor:
        chosen = torch.zeros_like(s).scatter(-1, s.topk(WRITTEN).indices, 1.0)
        return s * chosen

    def rows_moved(self, block: int) -> int:
        return self.shape.branches + (WRITTEN if block < self.shape.blocks else 0)
