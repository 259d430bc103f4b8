"""The n-gram table as a trained parameter, and its injection into the residual branches, over whole sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.training.delta_rule import causal_convolution
from flashnext.export.checkpoint.ngram_constants import derive
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.export.model import layers
from flashnext.export.ops.reference.common import rms_norm
from flashnext.runtime.ngram import ids


class NgramTable(nn.Module):
    """Hashed rows of a layer's table; the hash is the runtime's own, and so are its constants."""

    def __init__(self, c: ModelConfig, layer: int) -> None:
        super().__init__()
        constants = derive(c, layer)
        columns = c.ple_embed_dim // c.ngram_heads
        self.spec = NgramSpec(
            layer=layer,
            input=f"ngram_rows.{layer}",
            multipliers=constants.multipliers,
            head_sizes=constants.head_sizes,
            head_offsets=constants.head_offsets,
            heads_per_ngram=c.heads_per_ngram,
            eos=c.ngram_eos,
            columns=columns,
            rows=constants.rows,
            shards=(),
        )
        self.ngram_embedding = layers.Weight(constants.rows, columns)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [B, T, columns * heads] of tokens [B, T]; before the first token the history reads as eos."""
        before = torch.full((tokens.shape[0], len(self.spec.multipliers) - 1), self.spec.eos)
        rows = torch.from_numpy(ids(self.spec, tokens.numpy(), before.numpy()))
        return functional.embedding(rows, self.ngram_embedding.weight).flatten(-2)


def inject(module: layers.NgramInjection, r: Tensor, rows: Tensor) -> Tensor:
    """Branches r [B, T, n, H] after the injection of the rows [B, T, E]."""
    a = module.attributes
    branches, eps = int(a["branches"]), float(a["eps"])

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.unflatten(0, (branches, -1)), eps)

    key = norm(module.key_proj(rows).unflatten(-1, (branches, -1)), module.norm_key.weight)
    d = (key * norm(r, module.norm_query.weight)).sum(-1, keepdim=True) / math.sqrt(r.shape[-1])
    u = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt()) * module.value_proj(rows)[..., None, :]
    normed = norm(u, module.norm_conv.weight).flatten(-2)
    conv = causal_convolution(normed, module.conv1d.weight, int(a["dilation"]))
    return r + u + functional.silu(conv).unflatten(-1, (branches, -1))
