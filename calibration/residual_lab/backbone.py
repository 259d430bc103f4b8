"""The small model around a residual design: causal attention and gated MLPs in turn, nothing else.

Depth is what residual designs differ in, so the backbone is deep for its size: 8 layers, 16 blocks, of 64 columns.
Blocks start from the same values whatever the design is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.designs.catalogue import DESIGNS
from flashnext.calibration.training.weights import first_value
from flashnext.export.model.layers import Linear, Weight
from flashnext.export.ops.reference.common import rotate

ROPE_THETA = 10_000.0
MUON = r"blocks\.\d+\.\w+_proj\.weight"
"""What Muon trains: the blocks' matrices. Whatever belongs to the residual is AdamW's, as in the full model."""


class Attention(nn.Module):
    """Causal softmax attention with RoPE over whole sequences x [B, T, H]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.hidden
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(width, width) for _ in range(4))
        dim = width // shape.heads
        self.inv_freq = nn.Buffer(1.0 / ROPE_THETA ** (torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(x.shape[1])
        q, k = (rotate(t, positions, self.inv_freq, 1.0).transpose(1, 2) for t in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Linear(shape.hidden, shape.mlp) for _ in range(2))
        self.down_proj = Linear(shape.mlp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Backbone(nn.Module):
    """Embedding, blocks and LM head, with a residual design between them."""

    def __init__(self, design: str, shape: Shape, seed: int) -> None:
        super().__init__()
        self.embed_tokens = Weight(shape.vocabulary, shape.hidden)
        self.lm_head = Weight(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList((Mlp if block % 2 else Attention)(shape) for block in range(shape.blocks))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(self.named_parameters()):
                parameter.copy_(first_value(name, parameter.shape, shape.blocks, generator))
        with torch.random.fork_rng():  # designs draw their own first values when they are made
            torch.manual_seed(seed)
            self.residual = DESIGNS[design](shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """The LM head's input [B, T, H] for tokens [B, T]."""
        state = self.residual.start(functional.embedding(tokens, self.embed_tokens.weight))
        for number, block in enumerate(self.blocks):
            x, state = self.residual.read(number, state)
            state = self.residual.write(number, state, block(x))
        return self.residual.finish(state)
