"""Hyper-Connections whose mixing keeps the mean: a doubly stochastic matrix, made so by Sinkhorn and Knopp's iteration.

    v = RMSNorm(vec(R))                                                    no weight: the projections have it
    a = sigmoid(c_a phi_a v + d_a)      [n]     read
    b = 2 sigmoid(c_b phi_b v + d_b)    [n]     write
    M = Sinkhorn(c_m phi_m v + d_m)     [n, n]  rows and columns sum to 1
    x = RMSNorm(sum_i a_i R_i),  R_j' = sum_i M_ji R_i + b_j F(x)

Xie et al., arXiv 2512.24880, equations 7 to 9: 20 iterations, and c = 0.01 at the start. Freedom taken for what is
left open there: phi starts at 0; d_a at 1 for branch (block mod n) and -1 for the others, so that the blocks read the
branches differently (branches that are read and written alike stay alike for ever); d_b at 0, a write of 1; d_m at 0
on the diagonal and -8 off it, almost the identity. With equal branches training starts from pre-norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.designs.hyper_connections import DYNAMIC_SCALE, HyperConnections
from flashnext.export.ops.reference.common import rms_norm

ITERATIONS = 20
OFF_DIAGONAL = -8.0


def sinkhorn(logits: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Doubly stochastic matrices from logits [..., n, n]: columns, then rows, are divided by their sums, repeatedly."""
    n = logits.shape[-1]
    matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp()
    matrix = matrix.reshape(-1, n, n).permute(1, 2, 0).contiguous()  # tokens last: sums run along the memory
    for _ in range(iterations):
        matrix = matrix / matrix.sum(0, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    return matrix.permute(2, 0, 1).reshape(logits.shape)


class ManifoldConnection(nn.Module):
    """Coefficients of one block."""

    def __init__(self, shape: Shape, block: int) -> None:
        super().__init__()
        n = shape.branches
        self.branches, self.eps = n, shape.eps
        self.dynamic = nn.Parameter(torch.zeros(n * (n + 2), n * shape.hidden))
        self.scales = nn.Parameter(torch.full((3,), DYNAMIC_SCALE))
        read = torch.where(torch.arange(n) == block % n, 1.0, -1.0)
        mix = torch.where(torch.eye(n, dtype=torch.bool), 0.0, OFF_DIAGONAL)
        self.static = nn.Parameter(torch.cat([read, torch.zeros(n), mix.flatten()]))

    def forward(self, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read [B, T, n], mix [B, T, n, n] (from, to) and write [B, T, n] of branches r [B, T, n, H]."""
        flat, n = r.flatten(-2), self.branches
        scale = self.scales.repeat_interleave(torch.tensor([n, n, n * n]))
        logits = scale * (rms_norm(flat, torch.zeros(()), self.eps) @ self.dynamic.T) + self.static
        read, write, mix = logits.split([n, n, n * n], dim=-1)
        return torch.sigmoid(read), sinkhorn(mix.unflatten(-1, (n, n))).mT, 2 * torch.sigmoid(write)


class ManifoldHyperConnections(HyperConnections):
    """State as in `HyperConnections`."""

    def connection(self, block: int) -> nn.Module:
        return ManifoldConnection(self.shape, block)
