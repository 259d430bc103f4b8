"""Rotary frequencies: plain, and YaRN (arXiv 2309.00071), which rescales them and the size of cos and sin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashnext.export.config import ModelConfig
from flashnext.export.rope_config import RopeConfig


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] in float32, and the factor on cos and sin (attention AND indexer)."""
    rope, dim = config.rope, config.rotary_dim
    powers = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type == "default":
        return 1.0 / powers, 1.0
    low, high = _correction_range(rope, dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    # Fast columns keep their frequency (ramp 0), slow ones are interpolated (ramp 1).
    inv_freq = (1.0 / (rope.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)
    return inv_freq, attention_factor(rope)


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin: as configured, else 0.1 ln(factor) + 1 (or the ratio of the two mscales)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _correction_range(rope: RopeConfig, dim: int) -> tuple[float, float]:
    """Columns between which the ramp runs: those that turn beta_fast and beta_slow times over the native context."""
    context = rope.original_max_position_embeddings
    assert context is not None, "the configuration's parser requires it for YaRN"

    def column(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001
