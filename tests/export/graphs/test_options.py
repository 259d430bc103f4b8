"""What an export is asked for becomes definite and fits the model."""

from __future__ import annotations

import pytest

from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.errors import ConfigError
from flashnext.export.graphs.bundle import ExportOptions, fitted


def test_default_capacity_follows_a_short_context() -> None:
    """4,096 tokens are the default, but a model's own context is the limit; a capacity that was asked for is kept."""
    short = ModelConfig.from_dict(full_config({"max_position_embeddings": 1000}))
    assert fitted(ExportOptions(), short).capacity == 1000
    assert fitted(ExportOptions(capacity=64), short).capacity == 64
    assert fitted(ExportOptions(), ModelConfig.from_dict(full_config())).capacity == 4096
    with pytest.raises(ConfigError, match="1001 is outside"):
        fitted(ExportOptions(capacity=1001), short)
