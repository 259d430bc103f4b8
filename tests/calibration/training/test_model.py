"""The training form computes what the export's graphs compute, and its parameters are the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.weights import TrainedWriter, load_model
from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.layout import expected_tensors
from flashnext.runtime import LLM

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 490, 150)]
TOKENS[40] = TOKENS[90] = 496
"""Longer than the budget of the random checkpoint, with two document ends: n-gram histories restart there."""


@pytest.fixture(scope="module")
def model(random_checkpoint: Path) -> TrainingModel:
    return load_model(Checkpoint.open(random_checkpoint))


def test_logits_are_those_of_the_graphs(random_bundle: Path, model: TrainingModel) -> None:
    with LLM(random_bundle, engine="torch:reference", threads=1) as llm:
        (expected,), (expected_draft,) = llm.score([TOKENS]), llm.score_draft([TOKENS])
    with torch.no_grad():
        out = model(torch.tensor([TOKENS]))
        assert out.draft_hidden is not None
        found, draft = model.logits(out.hidden[0]).numpy(), model.logits(out.draft_hidden[0]).numpy()
    assert np.abs(found - expected).max() <= 2e-4 * expected.std()
    assert np.abs(draft - expected_draft).max() <= 2e-4 * expected_draft.std()


def test_batches_do_not_mix_and_dense_equals_sparse_within_the_budget(model: TrainingModel) -> None:
    tokens = torch.tensor([TOKENS[:70], TOKENS[70:140]])
    with torch.no_grad():
        both = model(tokens, mode="dense").hidden
        sparse = model(tokens, mode="sparse").hidden
        alone = model(tokens[1:], mode="dense").hidden
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)
    budget = model.config.indexer_budget
    torch.testing.assert_close(both[:, :budget], sparse[:, :budget], rtol=1e-4, atol=1e-5)
    assert (both[:, budget + 8 :] - sparse[:, budget + 8 :]).abs().max() > 1e-3


def test_parameters_are_the_checkpoints(random_checkpoint: Path, model: TrainingModel) -> None:
    constants = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    expected = {n for n in expected_tensors(model.config) if not n.endswith(constants)}
    assert set(model.state_dict()) == expected


def test_written_weights_are_read_again(random_checkpoint: Path, model: TrainingModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((random_checkpoint / "config.json").read_text())
    TrainedWriter(model).write(tmp_path, shards=3)
    again = load_model(Checkpoint.open(tmp_path)).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value), name
