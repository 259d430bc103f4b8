"""The decomposition of reads: by hand for two branches, and its sums on a model with every mechanism."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from flashnext.calibration.residual.paths import Block, PathListener, Paths, readers, sources
from flashnext.calibration.residual.stream import Read, ResidualModel, Store
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.model.layers import GatedResidual


@pytest.fixture(scope="module")
def paths(model: ResidualModel, tokens: np.ndarray) -> Paths:
    listener = PathListener(model.config)
    model.run(tokens, listener, logits=False)
    return listener.result()


def test_contributions_sum_to_the_input_and_shares_to_one(paths: Paths) -> None:
    assert paths.tokens == 48
    assert paths.sum_error < 3e-8
    assert paths.model_error < 1e-5
    assert np.abs(paths.shares.sum(-1) - 1).max() < 3e-8
    assert np.abs(paths.by_branch.sum((0, 2)) - 1).max() < 3e-8


def test_nothing_comes_from_what_has_not_been_written(paths: Paths) -> None:
    later = paths.spans() < 1
    assert (paths.shares[later] == 0).all()
    assert (paths.shares[~later] > 0).all()


def test_the_first_read_sees_the_embedding_alone(paths: Paths) -> None:
    assert paths.shares[0, 0] == pytest.approx(1, abs=1e-12)


def test_blocks_have_the_models_order(watched_checkpoint: Checkpoint) -> None:
    config = watched_checkpoint.config
    assert [b.name for b in readers(config)][:3] == ["layers.0.mixer", "layers.0.mlp", "layers.1.mixer"]
    assert readers(config)[-1] == Block("final", 2 * config.num_hidden_layers + 1)
    named = {b.name: b.place for b in sources(config)}
    (layer,) = config.ngram_layers
    assert named["embedding"] == 0
    assert named[f"layers.{layer}.ngram"] == named[f"layers.{layer}.mixer"] - 1


def tiny(watched_checkpoint: Checkpoint) -> tuple[ModelConfig, GatedResidual]:
    """One layer, two branches of two channels; gates of one half (W_up = 0), no epsilon, norm weights of zero."""
    config = dataclasses.replace(
        watched_checkpoint.config,
        num_hidden_layers=1,
        layer_types=watched_checkpoint.config.layer_types[:1],
        ple_layer_ids=[],
        hc_count=2,
        hidden_size=2,
        hc_lowrank=1,
        rms_norm_eps=0.0,
    )
    module = GatedResidual(config).requires_grad_(False)
    for parameter in module.parameters():
        parameter.zero_()
    return config, module


def test_shares_by_hand(watched_checkpoint: Checkpoint) -> None:
    config, module = tiny(watched_checkpoint)
    embedding = torch.tensor([[[[3.0, 4.0], [3.0, 4.0]]]])
    y, s = torch.tensor([[[5.0, 0.0]]]), torch.tensor([[[1.0, 2.0]]])
    after = embedding + s[..., None] * y[..., None, :]  # [[8, 4], [13, 4]]
    listener = PathListener(config)
    listener.begin(np.zeros((1, 1), np.int32))
    nothing = torch.zeros(1, 1, 2)
    listener.read(Read("layers.0.mixer", embedding, nothing, s, lambda r: r, module))
    listener.store(Store("embedding", None, embedding, None, None))
    listener.read(Read("layers.0.mlp", after, nothing, s, lambda r: r, module))
    listener.store(Store("layers.0.mixer", embedding, after, y, s))
    found = listener.result()
    rms = np.sqrt([(64 + 16) / 2, (169 + 16) / 2])
    from_embedding = np.array([3.0, 4.0]) * (1 / rms).sum() / 4  # gate 1/2, mean over two branches
    from_mixer = 5 * (1 / rms[0] + 2 / rms[1]) / 4
    whole = np.linalg.norm(from_embedding) + from_mixer
    assert found.shares[1, :2] == pytest.approx([np.linalg.norm(from_embedding) / whole, from_mixer / whole])
    terms = np.array([[5 / rms[0], 5 / rms[0]], [5 / rms[1], 10 / rms[1]]])
    assert found.by_branch[:, 1, :2] == pytest.approx(terms / terms.sum())


def test_spans_and_groups_by_hand() -> None:
    shares = np.array([[1.0, 0.0], [0.25, 0.75]])
    blocks = [Block("a", 1), Block("b", 14)]
    found = Paths(blocks, [Block("embedding", 0), Block("a", 13)], shares, np.stack([shares, shares]) / 2)
    assert found.by_span() == {"1": (1 + 0.75) / 2, "2-12": 0.0, "over 12": 0.125}
    assert found.longest(12, 3) == [(Block("embedding", 0), Block("b", 14), 0.25)]
    assert found.mean_spans() == pytest.approx([(1 + 0.25 * 14 + 0.75) / 2] * 2)
    assert found.branch_shares() == [0.5, 0.5]
