"""The Gated Residual of Qwen3.8-Flash-Next, which this project runs: gates for reading and writing n branches.

    Rn = RMSNorm(R_i; gamma_i),  G = sigmoid(W_up silu(W_down vec(Rn) / n))
    x  = mean_i(G_i * Rn_i),  s = 2 sigmoid(W_inject vec(Rn) / n),  R_i' = R_i + s_i F(x)

Formulas are those of the op `GatedResidual` and its reference, which computes them here too: plain autograd, so that
times compare with the other designs' (training of the small model has a faster backward pass). W_inject starts at 0,
so every write gate starts at 1; rank is H / 8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnext.calibration.residual_lab.designs.base import Design, Shape, State, copies, drawn
from flashnext.export.ops.reference import gated_residual as reference


class Gates(nn.Module):
    """Weights of one read and, for a block, of its write."""

    def __init__(self, shape: Shape, last: bool) -> None:
        super().__init__()
        width = shape.branches * shape.hidden
        self.norm_weight = nn.Parameter(torch.zeros(width))
        self.down = drawn(shape.rank, width)
        self.up = drawn(width, shape.rank)
        self.inject = None if last else nn.Parameter(torch.zeros(shape.branches, width))


class GatedResidual(Design):
    """State: the branches [B, T, n, H]; between read and write also the write gates [B, T, n]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.gates = nn.ModuleList(Gates(shape, block == shape.blocks) for block in range(shape.blocks + 1))

    def start(self, embedding: Tensor) -> State:
        return copies(embedding, self.shape.branches)

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        g, n = self.gates_of(block), self.shape.branches
        x, flat = reference.read(state, g.norm_weight, g.down, g.up, n, self.shape.eps)
        return x, (state, None if g.inject is None else self.write_gates(reference.write_gates(flat, g.inject, n)))

    def gates_of(self, block: int) -> Gates:
        """The weights that read for a block."""
        module = self.gates[block]
        assert isinstance(module, Gates)
        return module

    def write_gates(self, s: Tensor) -> Tensor:
        """The write gates that are used, from all of them [B, T, n]."""
        return s

    def write(self, block: int, state: State, y: Tensor) -> State:
        r, s = state
        return reference.write(r, y, s)

    def finish(self, state: State) -> Tensor:
        return self.read(self.shape.blocks, state)[0]

    def rows_moved(self, block: int) -> int:
        return self.shape.branches * (2 if block < self.shape.blocks else 1)
