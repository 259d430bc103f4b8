"""Recurrent states in BF16: half their memory, the same text on every engine, logits next to those of float states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flashnext.export.errors import ConfigError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import LLM

TEXT = [int(t) for t in np.random.default_rng(5).integers(3, 250, 90)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("recurrent") / "bundle"
    export_bundle(random_checkpoint, folder, ExportOptions(capacity=256, slots=3, recurrent_dtype="bfloat16"))
    return folder


def logits(bundle: Path, engine: str) -> NDArray[np.float32]:
    with LLM(bundle, engine=engine, prefill_chunk=16) as llm:  # only what a step leaves to the next one is rounded
        return np.asarray(llm.score([TEXT])[0])


def test_the_manifest_says_so(bundle: Path) -> None:
    manifest = Manifest.read(bundle)
    states = [t for g in manifest.graphs.values() for t in g.inputs if t.name.endswith(".recurrent_state")]
    assert manifest.recurrent_dtype == "bfloat16"
    assert states
    assert {t.dtype for t in states} == {"bfloat16"}


@pytest.mark.slow
def test_engines_agree(bundle: Path, random_bundle: Path) -> None:
    """And the rounded states show: else they would still be float."""
    exact = logits(random_bundle, "onnxruntime")
    portable, torch = logits(bundle, "onnxruntime"), logits(bundle, "torch")
    spread = exact.std()
    print(
        f"{np.abs(portable - torch).max() / spread:.1e}, {np.abs(portable - exact).max() / spread:.1e} of the deviation"
    )
    assert np.abs(portable - torch).max() < 2e-3 * spread  # a state at a rounding's edge may differ by a BF16 step
    assert 0 < np.abs(portable - exact).max() < 5e-2 * spread


def test_other_dtypes_are_refused(tmp_path: Path, random_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="--recurrent-dtype float16 is not one of float32, bfloat16"):
        export_bundle(random_checkpoint, tmp_path / "bundle", ExportOptions(recurrent_dtype="float16"))
