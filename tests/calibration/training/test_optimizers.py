"""Every parameter is trained by exactly one optimizer, and fused projections as their logical matrices."""

from __future__ import annotations

import re

import torch

from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.muon import BatchedMuon
from flashnext.calibration.training.optimizers import Optimizers, Rates, cuts_of, split
from flashnext.calibration.training.weights import initialize
from flashnext.export.config import ModelConfig


def test_every_parameter_is_in_exactly_one_group(tiny_config: ModelConfig) -> None:
    named = dict(TrainingModel(tiny_config).named_parameters())
    groups = split(named, cuts_of(named, tiny_config))
    listed = [name for group in groups.values() for name in group]
    assert sorted(listed) == sorted(named)
    optimizers = Optimizers(named, cuts_of(named, tiny_config), Rates())
    adamw = [id(p) for g in optimizers.adamw.param_groups for p in g["params"]]
    muon = {id(p.parameter) for p in optimizers.pieces}
    assert len(adamw) == len(set(adamw))
    assert muon | set(adamw) == {id(p) for p in named.values()}
    assert not muon & set(adamw)


def test_what_goes_where(tiny_config: ModelConfig) -> None:
    named = dict(TrainingModel(tiny_config).named_parameters())
    groups = split(named, cuts_of(named, tiny_config))
    assert all(name.endswith("ngram_embedding.weight") for name in groups["table"])
    for name in groups["muon"]:
        assert re.search(r"_proj|fc_", name), name
    for word in ("embed_tokens", "norm", "conv1d", "A_log", "dt_bias"):
        assert any(word in name for name in groups["plain"]), word
    for word in ("lm_head", "mlp.gate.weight", "block_inject", "input_mix", "shared_expert_gate", "in_proj_a"):
        assert any(word in name for name in groups["decayed"]), word


def test_pieces_cover_their_parameters_once(tiny_config: ModelConfig) -> None:
    named = dict(TrainingModel(tiny_config).named_parameters())
    optimizers = Optimizers(named, cuts_of(named, tiny_config), Rates())
    covered = {id(p): torch.zeros_like(p) for p in named.values()}
    for pieces in optimizers.pieces:
        for part in pieces.cut(covered[id(pieces.parameter)]):
            part.add_(1)
        assert (covered[id(pieces.parameter)] == 1).all()
        assert all(m.dim() == 2 for m in pieces.matrices)
    by_parameter = {id(p.parameter): p for p in optimizers.pieces}
    gate_up = by_parameter[id(named["layers.0.mlp.experts.gate_up_proj"])]
    assert len(gate_up.matrices) == 2 * tiny_config.num_experts


def test_a_step_orthogonalizes_each_logical_matrix(tiny_config: ModelConfig) -> None:
    """Queries and gates of attention lie in turns in one weight; each is stepped as one matrix of its own."""
    model = TrainingModel(tiny_config)
    initialize(model, 0)
    named = dict(model.named_parameters())
    optimizers = Optimizers(named, cuts_of(named, tiny_config), Rates(muon=1e-2))
    weight = named["layers.3.self_attn.q_proj.weight"]
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizers.step(1.0)
    step = before * (1 - 1e-3) - weight.detach()
    for part in step.unflatten(0, (tiny_config.num_attention_heads, 2, -1)).unbind(1):
        values = torch.linalg.svdvals(part.flatten(0, 1)) / (1e-2 * 0.2 * max(part.flatten(0, 1).shape) ** 0.5)
        assert values.min() > 0.5
        assert values.max() < 1.5
    others = [n for n, p in named.items() if p.grad is None]
    assert len(others) == len(named) - 1


def test_batched_muon_is_muon() -> None:
    generator = torch.Generator().manual_seed(2)
    ours = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((8, 24), (8, 24), (24, 8), (16, 16))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    pair = (
        BatchedMuon(ours, lr=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon(theirs, lr=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.01)  # theirs computes in bfloat16
