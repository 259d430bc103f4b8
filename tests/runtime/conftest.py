"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.manifest import CheckpointRef, Manifest


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., Manifest]:
    """A manifest of the small default model without graphs; keywords replace its fields."""

    def make(**changes: Any) -> Manifest:
        fields: dict[str, Any] = {
            "config": ModelConfig.from_dict(full_config(None)),
            "dtype": "float32",
            "window": 4,
            "capacity": 64,
            "slots": 3,
            "residual_dtype": "float32",
            "checkpoint": CheckpointRef("/nowhere", "0" * 64, "/nowhere"),
            "graphs": {},
            "weights": (),
            "ngrams": (),
            "ops": {},
        }
        return Manifest(**fields | changes)

    return make
