"""One stream, and a norm before each block: x = RMSNorm(R), R' = R + F(x).

The baseline that all others are measured against (Xiong et al., arXiv 2002.04745; with RMSNorm, arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from flashnext.calibration.residual_lab.designs.base import Design, RmsNorm, Shape, State


class PreNorm(Design):
    """State: the stream [B, T, H]."""

    def __init__(self, shape: Shape, norm: Callable[[Shape], nn.Module] = RmsNorm) -> None:
        super().__init__(shape)
        self.norms = nn.ModuleList(norm(shape) for _ in range(shape.blocks + 1))

    def start(self, embedding: Tensor) -> State:
        return embedding

    def read(self, block: int, state: State) -> tuple[Tensor, State]:
        return self.norms[block](state), state

    def write(self, block: int, state: State, y: Tensor) -> State:
        return state + y

    def finish(self, state: State) -> Tensor:
        return self.norms[-1](state)

    def rows_moved(self, block: int) -> int:
        return 2 if block < self.shape.blocks else 1
