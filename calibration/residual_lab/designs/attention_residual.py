"""Block Attention Residuals: a block reads a weighted mean of what groups of earlier blocks wrote.

    w = softmax over sources j of <q, RMSNorm(S_j)>,  x = norm(sum_j w_j S_j)

Sources are the embedding, the sum of each finished group of blocks, and the running sum of the present group; each
block, and the LM head, has a query q of its own that starts at 0. Kimi Team, arXiv 2603.15031: "Block AttnRes".
Zero queries weigh all sources alike, which a norm follows, so training starts from pre-norm. Freedom taken: four
groups of four blocks (the paper: about eight groups, in models of many more layers), to hold as much as four branches.
`gated` takes GatedNorm for the blocks' norms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashnext.calibration.residual_lab.designs.base import Design, RmsNorm, Shape, State
from flashnext.calibration.residual_lab.designs.gated_norm import GatedNorm

GROUPS = 4


class DepthAttention(nn.Module):
    """The weighted mean over sources for one reader."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.key_norm = RmsNorm(shape)
        self.query = nn.Parameter(torch.zeros(shape.hidden))

    def forward(self, sources: list[Tensor]) -> Tensor:
        stacked = torch.stack(sources, dim=-2)
        weights = (self.key_norm(stacked) @ self.query).softmax(-1)
        return (weights[..., None] * stacked).sum(-2)


class AttentionResidual(Design):
    """State: the sources, the running sum of the present group last."""

    def __init__(self, shape: Shape, gated: bool = False) -> None:
        super().__init__(shape)
        self.group = max(shape.blocks // GROUPS, 1)
        self.attention = nn.ModuleList(DepthAttention(shape) for _ in range(shape.blocks + 1))
        self.norms = nn.ModuleList((GatedNorm if gated else RmsNorm)(shape) for _ in range(shape.blocks + 1))

    def start(self, embedding: Tensor) -> State:
        return [embedding]

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        return self.norms[block](self.attention[block](state)), state

    def write(self, block: int, state: State, y: Tensor) -> State:
        if block % self.group == 0:  # a new group: its sum starts with this output
            return [*state, y]
        return [*state[:-1], state[-1] + y]

    def finish(self, state: State) -> Tensor:
        return self.read(self.shape.blocks, state)[0]

    def rows_moved(self, block: int) -> int:
        sources = 1 + (block + self.group - 1) // self.group
        return sources + (1 if block < self.shape.blocks else 0)
