"""Several branches with nothing to learn between them: read all alike, write to one in turn.

    x = mean_i(RMSNorm(R_i; gamma_i)),  R_i' = R_i + F(x) where i = block mod n

What is left of a Gated Residual without its gates: it tells what width alone is worth. Freedom taken: each branch is
normalised by itself before the mean, as the Gated Residual does it (with the norm after the mean the branches would be
one stream again). With one branch this is pre-norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnext.calibration.residual_lab.designs.base import Design, Shape, State, copies
from flashnext.export.ops.reference.common import rms_norm


class StaticWidening(Design):
    """State: the branches [B, T, n, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        weights = (torch.zeros(shape.branches * shape.hidden) for _ in range(shape.blocks + 1))
        self.norm_weights = nn.ParameterList(weights)

    def start(self, embedding: Tensor) -> State:
        return copies(embedding, self.shape.branches)

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        weight = self.norm_weights[block].view(self.shape.branches, -1)
        return rms_norm(state, weight, self.shape.eps).mean(-2), state

    def write(self, block: int, state: State, y: Tensor) -> State:
        chosen = torch.arange(self.shape.branches) == block % self.shape.branches
        return state + chosen[:, None] * y[..., None, :]

    def finish(self, state: State) -> Tensor:
        return self.read(self.shape.blocks, state)[0]

    def rows_moved(self, block: int) -> int:
        return self.shape.branches + (1 if block < self.shape.blocks else 0)
