"""A small model whose residual can be watched, and tokens for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashnext.calibration.residual.stream import ResidualModel
from flashnext.export.checkpoint.reader import Checkpoint

BATCH, LENGTH = 2, 24


@pytest.fixture(scope="session")
def watched_checkpoint(random_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(random_checkpoint)


@pytest.fixture(scope="session")
def model(watched_checkpoint: Checkpoint) -> ResidualModel:
    return ResidualModel.open(watched_checkpoint, BATCH, LENGTH)


@pytest.fixture(scope="session")
def tokens(watched_checkpoint: Checkpoint) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.integers(0, watched_checkpoint.config.vocab_size, (BATCH, LENGTH + 1)).astype(np.int32)
