"""Weights of a training model: first values, reading from a checkpoint, writing as one in the official layout."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashnext.calibration.training.model import TrainingModel
from flashnext.export.checkpoint.random_layout import WeightWriter
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError

PREFIX = "model.language_model."
ONES = ("linear_attn.norm.weight",)
"""Norm weights that multiply directly; all others multiply by 1 + w and start at 0."""
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight", "value_proj.weight")
"""Matrices that write into the residual."""


@torch.no_grad()
def initialize(model: TrainingModel, seed: int) -> None:
    """First values, drawn in the order of the parameters' names."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * model.config.num_hidden_layers
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(first_value(name, parameter.shape, depth, generator))


def first_value(name: str, shape: torch.Size, depth: int, generator: torch.Generator) -> Tensor:
    """First values of a parameter by its name, in a model of `depth` blocks that write into the residual."""
    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if name.endswith(".dt_bias"):
        # Inverse softplus of steps between 0.001 and 0.1, evenly on a logarithmic scale (as in Mamba 2).
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
        return step + (-(-step).expm1()).log()
    if len(shape) == 1:
        return torch.full(shape, 1.0 if name.endswith(ONES) else 0.0)
    if name.endswith("block_inject_weight.weight"):
        return torch.zeros(shape)  # write gates start at 1: a plain residual
    values = torch.empty(shape).normal_(generator=generator)
    if "conv1d" in name:
        return values * shape[-1] ** -0.5
    if name.endswith(("embed_tokens.weight", "ngram_embedding.weight")):
        return values * 0.5
    if name.endswith("lm_head.weight"):
        return values * 0.02
    scale = shape[-1] ** -0.5
    # Blocks that write into the residual start small, so that the branches do not grow with depth (GPT-2's rule).
    return values * (scale * depth**-0.5 if name.endswith(OUTPUTS) else scale)


def load_model(checkpoint: Checkpoint) -> TrainingModel:
    """A training model with a checkpoint's weights in float32."""
    model = TrainingModel(checkpoint.config)
    model.load_state_dict({name: _stored(checkpoint, name) for name in model.state_dict()})
    return model


def _stored(checkpoint: Checkpoint, name: str) -> Tensor:
    parts = [name]
    if name.endswith("ngram_embedding.weight"):
        parts = list(checkpoint.ngram_spec(int(name.split(".")[1])).shards)
    elif ".experts." in name and name not in checkpoint.tensors:
        raise CheckpointError(
            f"The experts of {checkpoint.folder} are stored one by one; training reads fused ones ({name}). "
            "Save the checkpoint with fused experts."
        )
    return torch.from_numpy(np.concatenate([checkpoint.array(p).astype(np.float32) for p in parts]))


class TrainedWriter(WeightWriter):
    """Writes a model's weights as BF16 shards; what training does not touch (hash constants) is derived as ever."""

    def __init__(self, model: TrainingModel) -> None:
        super().__init__(model.config, 0, "BF16", 1.0, "fused", PREFIX, vision=False)
        state, derived = model.state_dict(), self.canonical

        def canonical(name: str) -> np.ndarray[Any, Any]:
            values: np.ndarray[Any, Any] = state[name].numpy() if name in state else derived(name)
            return values

        self.canonical = lru_cache(maxsize=2)(canonical)
