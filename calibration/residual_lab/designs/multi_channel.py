"""A multi-channel residual: slices of the stream with a norm and learnable scales of their own.

    x = concat_c(a_c LayerNorm(R_c)),  R_c' = R_c + b_c F(x)_c              c = 1 … 2, 4 or 8

The stream's H columns are cut into channels. Each block has a read scale a and a write scale b for each channel; they
start at 1 and are decayed, so a channel that a block does not need fades for it. A scale that leaves 0.1 … 3 raises an
alarm: below, the channel is lost to the block; above, one channel drowns the others. Freedom taken: channels are
slices, not copies (copies with equal scales would be read and written alike, so no gradient could ever tell them
apart), and LayerNorm has no weights of its own (the scale has their place).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.residual_lab.designs.base import Design, Shape, State

RANGE = (0.1, 3.0)
READ, WRITE = 0, 1


class MultiChannel(Design):
    """State: the stream [B, T, H]."""

    def __init__(self, shape: Shape, channels: int) -> None:
        super().__init__(shape)
        self.channels = channels
        # A matrix for each block, since matrices are what is decayed; the LM head only reads.
        ways = [2] * shape.blocks + [1]
        self.scales = nn.ParameterList(torch.ones(way, channels) for way in ways)

    def start(self, embedding: Tensor) -> State:
        return embedding

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        sliced = state.unflatten(-1, (self.channels, -1))
        normed = functional.layer_norm(sliced, sliced.shape[-1:], eps=self.shape.eps)
        return (self.scales[block][READ, :, None] * normed).flatten(-2), state

    def write(self, block: int, state: State, y: Tensor) -> State:
        scaled = self.scales[block][WRITE, :, None] * y.unflatten(-1, (self.channels, -1))
        return state + scaled.flatten(-2)

    def finish(self, state: State) -> Tensor:
        return self.read(self.shape.blocks, state)[0]

    def rows_moved(self, block: int) -> int:
        return 2 if block < self.shape.blocks else 1

    def alarms(self) -> list[str]:
        low, high = RANGE
        return [
            f"{'write' if way == WRITE else 'read'} scale of channel {channel} in block {block} is {value:.3f}, "
            f"outside {low} … {high}"
            for block, scales in enumerate(self.scales)
            for way, row in enumerate(scales.tolist())
            for channel, value in enumerate(row)
            if not low <= value <= high
        ]
