"""One stream, and a norm with a gate of its own before each block.

    y = RMSNorm(R),  x = sigmoid(W_up silu(W_down y)) * y

GatedNorm of Qiu et al., "A Unified View of Attention and Residual Sinks" (arXiv 2601.22966, section 3.4), after every
norm, the last one too. Freedom taken: rank H / 8 as the Gated Residual has it (the paper: 16 for H of some thousands);
the blocks are not narrowed to make up for the gates' parameters, which the report counts instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.calibration.residual_lab.designs.base import RmsNorm, Shape, drawn
from flashnext.calibration.residual_lab.designs.pre_norm import PreNorm


class GatedNorm(RmsNorm):
    """RMSNorm, then an elementwise gate of low rank computed from its result."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.down = drawn(shape.rank, shape.hidden)
        self.up = drawn(shape.hidden, shape.rank)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.sigmoid(functional.silu(y @ self.down.T) @ self.up.T) * y


class GatedPreNorm(PreNorm):
    """State: the stream [B, T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, GatedNorm)
