"""A backbone with its optimizers: one update, and the losses of held-out windows."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.evaluation.text import windows
from flashnext.calibration.residual_lab.backbone import MUON, Backbone
from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.training.data import Tokens
from flashnext.calibration.training.losses import token_loss
from flashnext.calibration.training.optimizers import Optimizers
from flashnext.calibration.training.settings import Settings


class Learner:
    """A design in training."""

    def __init__(self, design: str, shape: Shape, settings: Settings) -> None:
        self.model = Backbone(design, shape, settings.seed)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        cuts = {name: lambda w: [w] for name in self.parameters if re.fullmatch(MUON, name)}
        self.optimizers, self.clip = Optimizers(self.parameters, cuts, settings.rates), settings.clip

    def step(self, tokens: Tensor, rate: float) -> tuple[float, float]:
        """One update on windows [B, T] at `rate` times the peak rates.

        Returns the mean loss of the next token before it, and the norm of the whole gradient before clipping.
        """
        for parameter in self.parameters.values():
            parameter.grad = None
        hidden = self.model(tokens[:, :-1]).flatten(0, 1)
        loss = token_loss(hidden, self.model.lm_head.weight, tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.optimizers.step(rate)
        return loss.item(), norm.item()

    @torch.no_grad()
    def held_out(self, tokens: Tokens, length: int, count: int) -> NDArray[np.float64]:
        """Nats per token of each of the first `count` windows of held-out text."""
        out = []
        for batch in windows(tokens, length, count):
            logits = self.model(batch[:, :-1]) @ self.model.lm_head.weight.T
            out.append(functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none").double().mean(1))
        return torch.cat(out).numpy()

    def count(self) -> int:
        """Parameters in all."""
        return sum(p.numel() for p in self.parameters.values())
