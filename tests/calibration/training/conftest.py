"""A tiny model and a stream of tokens that it can learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    fields = {"num_hidden_layers": 4, "hidden_size": 32, "ple_embed_dim": 32, "vocab_size": 64, "indexer_budget": 8}
    eos = {"eos_token_id": 63, "bos_token_id": 63, "pad_token_id": 63, "ngram_vocab_size_base": 50}
    return ModelConfig.from_dict(full_config({**fields, **eos}))


@pytest.fixture(scope="session")
def stream() -> NDArray[Any]:
    """A token is often followed by its successor, so there is something to learn."""
    rng = np.random.default_rng(0)
    jumps = np.where(rng.random(4000) < 0.8, 1, rng.integers(0, 63, 4000))
    return (np.cumsum(jumps) % 63).astype(np.uint16)
