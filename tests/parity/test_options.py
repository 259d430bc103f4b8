"""Options of the export that change answers equal transformers with the same change in its configuration.

One bundle with a smaller indexer budget, YaRN, a window of 3 and a capacity that the text fills to the last token.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.runtime.model_runner import ModelRunner

from .configs import BASE, BY_NAME
from .driver import Sequences, score
from .oracle import Array, Oracle
from .references import checkpoint_of, deviation, oracle_of

CASE = BY_NAME["official"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CAPACITY, WINDOW = 150, 3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("options") / "bundle"
    options = ExportOptions(window=WINDOW, capacity=CAPACITY, slots=2, indexer_budget=16, rope_scaling=YARN)
    export_bundle(checkpoint_of(CASE), folder, options)
    return folder


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], Array]:
    """A text that fills the capacity, and the logits of the oracle with the changed configuration, same weights."""
    changed = {"indexer_budget": 16, "rope_parameters": BASE["rope_parameters"] | YARN, "max_position_embeddings": 256}
    oracle = Oracle(dataclasses.replace(CASE, changes=CASE.changes | changed))
    tokens = oracle.text(CAPACITY)
    logits = oracle.logits(tokens)
    assert deviation(oracle_of(CASE).logits(tokens), logits) > 0.1, "the options change nothing"
    return tokens, logits


@pytest.mark.parametrize("engine", ["torch:reference", "onnxruntime"])
def test_budget_rope_window_and_capacity(bundle: Path, engine: str, expected: tuple[list[int], Array]) -> None:
    tokens, logits = expected
    runner = ModelRunner.open(bundle, engine=engine, threads=1)
    assert deviation(score(runner, tokens), logits) < 2e-4
    sequences = Sequences(runner)
    sequences.start(1)
    found, keep = [sequences.step({1: tokens[:90]})[1]], 0
    for at in range(90, CAPACITY, 2):  # two tokens of three are kept; a fourth would be committed at once
        found.append(sequences.step({1: [*tokens[at : at + 2], 5][: CAPACITY - at]}, {1: keep})[1][:2])
        keep = 2
    assert deviation(np.concatenate(found), logits) < 2e-4
