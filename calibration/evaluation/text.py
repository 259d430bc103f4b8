"""Held-out loss of a model, whole or with parts taken away, and how well its indexer chooses.

Windows follow each other with one token shared, so every token but the first is predicted once, from at most a window
of context. All figures of one table see the same windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flashnext.calibration.training.attention import Mode
from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.objectives import indexer_losses, indexer_recall

BATCH = 4


def windows(tokens: NDArray[Any], length: int, limit: int | None = None) -> Iterator[Tensor]:
    """Batches [B, length + 1] of consecutive windows that share one token."""
    starts = list(range(0, len(tokens) - length, length))[:limit]
    for first in range(0, len(starts), BATCH):
        rows = [tokens[s : s + length + 1] for s in starts[first : first + BATCH]]
        yield torch.from_numpy(np.stack(rows).astype(np.int64))


@torch.no_grad()
def token_losses(
    model: TrainingModel, tokens: NDArray[Any], length: int, mode: Mode, ngrams: bool = True, limit: int | None = None
) -> NDArray[np.float64]:
    """Nats of each predicted token, [windows, length]."""
    out = []
    for batch in windows(tokens, length, limit):
        hidden = model(batch[:, :-1], mode=mode, draft=False, ngrams=ngrams).hidden
        nats = functional.cross_entropy(model.logits(hidden).mT, batch[:, 1:], reduction="none")
        out.append(nats.double().numpy())
    return np.concatenate(out)


@torch.no_grad()
def indexer_figures(model: TrainingModel, tokens: NDArray[Any], length: int, limit: int) -> tuple[float, float]:
    """Recall of the teacher's best blocks under dense attention, and the divergence from the teacher."""
    found = []
    for batch in windows(tokens, length, limit):
        out = model(batch[:, :-1], mode="dense")
        found.append((float(indexer_recall(model, out)), float(indexer_losses(model, out, chosen_only=False))))
    recall, divergence = np.mean(found, axis=0)
    return float(recall), float(divergence)
