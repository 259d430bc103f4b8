"""Random values for every tensor of the model, large enough that each mechanism shows in the output.

Training's small initial values would leave gates at one half, router scores equal and n-grams without effect, so a
test could not notice a missing part. Matrices are normal with variance gain^2 / fan-in: activations keep their size
through a block, and gains spread what goes into gates, router and logits. A tensor's values depend on the seed and on
its own name only: how a checkpoint is laid out (fused or per expert, shards, prefix, dtype) does not change them.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np

from flashnext.export.config import ModelConfig

Array = np.ndarray[Any, Any]

MATRIX_GAINS = (
    (r"lm_head\.weight", 4.0),
    (r"mlp\.gate\.weight", 2.0),
    (r"input_mix_weight_up", 2.0),
    (r"experts\.down_proj|shared_expert\.down_proj", 3.0),
    (r"self_attn\.[vo]_proj", 2.0),
    (r"shared_expert_gate|in_proj_[az]", 1.5),
)
"""Gain by name; 1 for the rest. SwiGLU lets about a third of its input's size through, and attention averages many
values to a small one: hence the gains on their way back into the residual stream."""

NORM_CENTRES = ((r"linear_attn\.norm\.weight", 1.0), (r"self_attn\.[qk]_norm\.weight", 0.6))
"""Mean of a norm's weights; 0 for the rest. The output norm of GDN multiplies by its weight itself, all others by
1 + w. Queries and keys are enlarged so that attention prefers some tokens clearly."""


def random_tensor(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, scale: float) -> Array:
    """float32 values of a tensor in its canonical form (experts fused, n-gram table whole)."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(".A_log"):
        return np.log(rng.uniform(0.01, 16.0, shape)).astype(np.float32)
    if name.endswith(".dt_bias"):
        return rng.uniform(-2.0, 1.0, shape).astype(np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return values * np.float32(0.2) + np.float32(_lookup(NORM_CENTRES, name, 0.0))
    if ".conv1d." in name:
        return values * np.float32(0.5)
    return values * np.float32(_deviation(name, shape, config) * scale)


def _deviation(name: str, shape: tuple[int, ...], config: ModelConfig) -> float:
    if name.endswith(("embed_tokens.weight", "ngram_embedding.weight")):
        return 1.0  # rows are looked up, not multiplied: no fan-in
    gain = _lookup(MATRIX_GAINS, name, 1.0)
    if "input_mix_weight_down" in name or "block_inject_weight" in name:
        gain *= config.hc_count  # the model divides these products by the number of branches
    return gain / float(np.sqrt(shape[-1]))


def _lookup(table: tuple[tuple[str, float], ...], name: str, default: float) -> float:
    return next((value for pattern, value in table if re.search(pattern, name)), default)
