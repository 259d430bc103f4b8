"""What a residual design is: how a block's input is read from what the blocks before it wrote.

The backbone asks for nothing else, so a design is one small module:

    state = design.start(embedding)
    for block, f in enumerate(blocks):
        x, state = design.read(block, state)        # x: the block's input, normalised
        state = design.write(block, state, f(x))
    hidden = design.finish(state)

Blocks are counted through the model: attention of layer 0, MLP of layer 0, attention of layer 1, …
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashnext.export.ops.reference.common import rms_norm

State = Any
"""What a design carries from block to block; only the design itself looks inside."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the backbone, and of what a design adds to it."""

    vocabulary: int = 4096
    hidden: int = 64
    layers: int = 8
    heads: int = 4
    mlp: int = 176
    branches: int = 4
    """copies of the stream in the designs that widen it, as in the full model"""
    rank: int = 8
    """of gates; the full model's is H / 8 too"""
    eps: float = 1e-6

    @property
    def blocks(self) -> int:
        return 2 * self.layers


class Design(nn.Module, ABC):
    """A residual design. Embeddings, block inputs and outputs are [B, T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def start(self, embedding: Tensor) -> State:
        """The state before the first block."""

    @abstractmethod
    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        """A block's input, and the state with whatever its write will need."""

    @abstractmethod
    def write(self, block: int, state: State, y: Tensor) -> State:
        """The state after a block's output y."""

    @abstractmethod
    def finish(self, state: State) -> Tensor:
        """The LM head's input."""

    @abstractmethod
    def rows_moved(self, block: int) -> int:
        """Vectors of H floats of the residual that a token reads and writes for a block.

        Counted as if a write and the next read were one pass over the residual, in which each vector that is needed is
        read once and each that changes is written once. Coefficients (a few floats for each branch) are left out.
        `block` may be the number of blocks: the read before the LM head, after which nothing is written.
        """

    def alarms(self) -> list[str]:
        """What a person should know about the parameters as they are now."""
        return []


class RmsNorm(nn.Module):
    """Zero-centred RMSNorm with a weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.eps
        self.weight = nn.Parameter(torch.zeros(shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def drawn(rows: int, columns: int) -> nn.Parameter:
    """A matrix of normal values that keeps the size of what it multiplies."""
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


def copies(x: Tensor, count: int) -> Tensor:
    """x [B, T, H] as identical branches [B, T, count, H]."""
    return x[..., None, :].expand(*x.shape[:-1], count, x.shape[-1])
