"""Hyper-Connections: read, write and mixing of n branches, each learnt and each depending on the token.

    Rn   = RMSNorm(R_i)                                                    for every branch
    a    = a_static + s_a tanh(Rn w_a)      [n]     read       starts as e_(block mod n)
    M    = M_static + s_a tanh(Rn W_m)      [n, n]  mix        starts as the identity
    b    = b_static + s_b tanh(Rn w_b)      [n]     write      starts as ones
    x    = RMSNorm(sum_i a_i R_i),  R_j' = sum_i M_ij R_i + b_j F(x)

Zhu et al., arXiv 2409.19606: dynamic hyper-connections with n = 4, initialised as they are there: w and W are 0 and
both s are 0.01, so training starts from pre-norm. Static connections are not decayed, dynamic ones are. Freedom taken:
RMSNorm for LayerNorm, the branches' mean for their sum at the end (the same, since a norm follows), and the baseline's
first weights for the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.residual_lab.designs.base import Design, RmsNorm, Shape, State, copies

DYNAMIC_SCALE = 0.01


class Connection(nn.Module):
    """Coefficients of one block."""

    def __init__(self, shape: Shape, block: int) -> None:
        super().__init__()
        n = shape.branches
        self.branches = n
        self.norm = RmsNorm(shape)
        self.dynamic = nn.Parameter(torch.zeros(n + 2, shape.hidden))
        # Kept as vectors: only matrices are decayed, and static connections are not to be.
        self.static_read = nn.Parameter(functional.one_hot(torch.tensor(block % n), n).float())
        self.static_mix = nn.Parameter(torch.eye(n).flatten())
        self.static_write = nn.Parameter(torch.ones(n))
        self.scale_in = nn.Parameter(torch.tensor([DYNAMIC_SCALE]))
        self.scale_out = nn.Parameter(torch.tensor([DYNAMIC_SCALE]))

    def forward(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read [B, T, n], mix [B, T, n, n] (from, to) and write [B, T, n] of branches r [B, T, n, H]."""
        dynamic = torch.tanh(self.norm(r) @ self.dynamic.T)
        read = self.static_read + self.scale_in * dynamic[..., 0]
        mix = self.static_mix.view(self.branches, -1) + self.scale_in * dynamic[..., 2:]
        return read, mix, self.static_write + self.scale_out * dynamic[..., 1]


class HyperConnections(Design):
    """State: the branches [B, T, n, H]; between read and write the mixed ones, and the write's coefficients."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.connections = nn.ModuleList(self.connection(block) for block in range(shape.blocks))
        self.norms = nn.ModuleList(RmsNorm(shape) for _ in range(shape.blocks + 1))

    def connection(self, block: int) -> nn.Module:
        """The module that gives a block's coefficients."""
        return Connection(self.shape, block)

    def start(self, embedding: Tensor) -> State:
        return copies(embedding, self.shape.branches)

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        read, mix, write = self.connections[block](state)
        # Products and sums: a batch of matrix products of four rows takes a processor twice as long.
        x = self.norms[block]((read[..., None] * state).sum(-2))
        return x, ((mix[..., None] * state[..., None, :]).sum(-3), write)

    def write(self, block: int, state: State, y: Tensor) -> State:
        mixed, write = state
        return torch.addcmul(mixed, write[..., None], y[..., None, :])

    def finish(self, state: State) -> Tensor:
        return self.norms[-1](state.mean(-2))

    def rows_moved(self, block: int) -> int:
        return self.shape.branches * (2 if block < self.shape.blocks else 1)
