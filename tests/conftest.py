"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default small random checkpoint (BF16, fused experts, MTP, tokenizer). Read it, never write into it."""
    return write_random_checkpoint(tmp_path_factory.mktemp("random_checkpoint"))
