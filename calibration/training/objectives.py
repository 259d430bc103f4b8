"""The losses of each stage of training, from one pass over a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashnext.calibration.training.attention import complete_blocks
from flashnext.calibration.training.losses import indexer_loss, recall, token_loss
from flashnext.calibration.training.model import Output, TrainingModel
from flashnext.calibration.training.settings import Settings, Stage


@dataclass(frozen=True)
class Objective:
    """What to differentiate, and its parts for the record."""

    total: Tensor
    parts: dict[str, float]
    output: Output


def trainable(name: str, stage: Stage) -> bool:
    """Whether a parameter trains in a stage."""
    return stage != "distill" or ".indexer." in name


def objective(model: TrainingModel, tokens: Tensor, stage: Stage, settings: Settings) -> Objective:
    """Run tokens [B, T] and weigh the stage's losses."""
    mode = {"pretrain": "plain", "distill": "dense", "sparse": "sparse"}[stage]
    out = model(tokens, mode=mode)
    parts: dict[str, Tensor] = {}
    if stage != "pretrain":
        parts["indexer_kl"] = indexer_losses(model, out, stage == "sparse")
    if stage == "distill":  # with sparse attention the teacher sees nothing but the chosen blocks
        parts["indexer_recall"] = indexer_recall(model, out)
    with torch.set_grad_enabled(stage != "distill" and torch.is_grad_enabled()):
        parts["loss"], parts["draft_loss"] = token_losses(model, out, tokens)
        parts["balance"] = torch.stack(out.trace.balance).mean()
        main = parts["loss"] + settings.draft_weight * parts["draft_loss"] + settings.balance_weight * parts["balance"]
    total = parts["indexer_kl"] if stage == "distill" else main + parts.get("indexer_kl", torch.zeros(()))
    return Objective(total, {name: value.item() for name, value in parts.items()}, out)


def token_losses(model: TrainingModel, out: Output, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss of the next token, and of the draft layer's token after it (zero without a draft layer)."""
    head = model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    main = token_loss(out.hidden[:, :-1].flatten(0, 1), head.weight, tokens[:, 1:].flatten())
    if out.draft_hidden is None:
        return main, torch.zeros(())
    return main, token_loss(out.draft_hidden[:, :-1].flatten(0, 1), head.weight, tokens[:, 2:].flatten())


def indexer_losses(model: TrainingModel, out: Output, chosen_only: bool) -> Tensor:
    """Mean over the QSA layers (the draft layer's too)."""
    block = model.config.indexer_compress_ratio
    losses = []
    for a in out.trace.attended:
        among = a.chosen if chosen_only else complete_blocks(a.weights.shape[-1], block)
        losses.append(indexer_loss(a.weights, a.scores, block, among))
    return torch.stack(losses).mean()


@torch.no_grad()
def indexer_recall(model: TrainingModel, out: Output) -> Tensor:
    """Mean over the QSA layers of the share of the teacher's best blocks that are chosen."""
    c = model.config
    found = [
        recall(
            a.weights,
            a.chosen,
            c.indexer_compress_ratio,
            c.budget_blocks,
            complete_blocks(a.weights.shape[-1], c.indexer_compress_ratio),
        )
        for a in out.trace.attended
    ]
    return torch.stack(found).mean()
