"""Keys and values in FP8: half of BF16's memory, a quarter of float's; the same logits on every engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.cli.main import main
from flashnext.runtime.states import allocate_states
from flashnext.runtime.validation.validator import validate

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "models" / "small"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")[:1200]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "fp8"
    options = ["--capacity", "1024", "--slots", "2", "--kv-cache-dtype", "fp8"]
    assert main(["export", str(SMALL), str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "plain"
    export_bundle(SMALL, folder, ExportOptions(capacity=1024, slots=2))
    return folder


def logits(bundle: Path, chunk: int = 64) -> NDArray[np.float32]:
    with LLM(bundle, prefill_chunk=chunk) as llm:
        return np.asarray(llm.score([llm.tokenizer.encode(TEXT)])[0])


def test_engines_agree(bundle: Path) -> None:
    """Sparse attention chooses: the prefill is longer than the indexer's budget."""
    report = validate(bundle, tokens=700)
    assert report.passed, [row for row in report.rows if not row]
    assert all(row.by_mean for row in report.rows)


def test_codes_replace_floats_and_little_else_changes(bundle: Path, plain: Path) -> None:
    """Chunks make no difference beyond rounding, FP8 some: it is there, and it is small."""
    exact, codes, chunked = logits(plain), logits(bundle), logits(bundle, chunk=9)
    spread = exact.std()
    moved, between = (np.abs(other - codes).mean() / spread for other in (exact, chunked))
    print(f"FP8 moves logits by {moved:.1e} of their deviation on average, other chunks by {between:.1e}")
    assert 2e-4 < moved < 1e-2
    assert between < 1e-4


def test_memory_of_a_slot(bundle: Path, plain: Path) -> None:
    codes, floats = (allocate_states(Manifest.read(folder)) for folder in (bundle, plain))
    for name, state in codes.items():
        factor = 4 if name.endswith((".key_state", ".value_state")) else 1
        assert factor * state.nbytes == floats[name].nbytes


def test_drafts_do_not_change_the_text(bundle: Path) -> None:
    with LLM(bundle, engine="torch") as llm:
        params = (SamplingParams(max_tokens=12, temperature=0.0, draft_tokens=n) for n in (0, 3))
        plain, drafted = (llm.generate([TEXT[:200]], p)[0].token_ids for p in params)
    assert plain == drafted
