"""The largest logits in place of whole rows: the same texts, and hardly ever a whole row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_folder import CHUNK, Machine

from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.engines.tensorrt import candidates, opening
from flashnext.runtime.engines.tensorrt.candidates import DeviceLogits
from flashnext.runtime.logits import SUM_ERROR
from flashnext.runtime.model_runner import StepBatch, StepOutput

PROMPTS: list[list[int]] = [list(range(40, 100)), [1, 2, 3], [7] * 20]
MOST = 24
"""Candidates of a row here: few, so that the vocabulary is much larger."""


@pytest.fixture(scope="module")
def reference(random_bundle: Path) -> Iterator[LLM]:
    with LLM(random_bundle, threads=1, prefill_chunk=CHUNK) as llm:
        yield llm


@pytest.fixture
def llm(engine_with_kernels: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(candidates, "MOST", MOST)
    machine(seed=3)
    with LLM(engine_with_kernels, engine="tensorrt") as opened:
        yield opened


def whole_rows(llm: LLM) -> int:
    """Of all graphs."""
    return sum(engine.whole_rows for engine in llm._runner._engines.values())  # type: ignore[union-attr]


FREE = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 5}
SETTLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 8},
    "usual": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p": {"temperature": 0.1, "top_p": 0.3},
    "min_p": {"temperature": 0.2, "min_p": 0.3},
    "cold": {"temperature": 1e-4},
    "penalties": {"top_k": 8, "presence_penalty": 0.1, "repetition_penalty": 1.05, "frequency_penalty": 0.1},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 1.5},
    "no stop": {"temperature": 0.0, "min_tokens": 8, "stop_token_ids": list(range(0, 200, 2))},
    "drafts": {"temperature": 0.0, "draft_tokens": 3},
    "drafts of a sampled text": {"top_k": 8, "draft_tokens": 3},
    "drafts that are drawn": {"top_k": 8, "draft_tokens": 3, "drafter": "mtp-sampled"},
}
"""What the largest logits settle in these texts."""
UNSETTLED: dict[str, dict[str, Any]] = {
    "free": {},
    "top_k of more": {"top_k": MOST},
    "penalties that raise": {"top_k": 8, "presence_penalty": -1.0},
    "penalties and top_p": {"top_p": 0.3, "presence_penalty": 0.1},
    "as hot as can be": {"temperature": 1e300, "top_p": 0.3},
}
"""What takes every row whole."""


@pytest.mark.parametrize("case", [*SETTLED, *UNSETTLED])
def test_texts_are_those_of_whole_rows(case: str, llm: LLM, reference: LLM) -> None:
    values = FREE | SETTLED.get(case, {}) | UNSETTLED.get(case, {})
    params = SamplingParams(max_tokens=8, ignore_eos=True, **values)
    found = llm.generate(PROMPTS, params)
    wanted = reference.generate(PROMPTS, params)
    assert [(o.token_ids, o.drafts) for o in found] == [(o.token_ids, o.drafts) for o in wanted]
    assert whole_rows(llm) == (0 if case in SETTLED else sum(len(o.token_ids) for o in found))


@pytest.mark.parametrize(("count", "rows"), [(3, 0), (MOST, 0), (MOST + 1, 8)])
def test_log_probabilities_are_those_of_whole_rows(llm: LLM, reference: LLM, count: int, rows: int) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=count, **{**FREE, "top_k": 20})
    (found,), (wanted,) = (x.generate(PROMPTS[:1], params) for x in (llm, reference))
    assert found.logprobs
    assert wanted.logprobs
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert [(t, p.rank) for t, p in ours.items()] == [(t, p.rank) for t, p in theirs.items()]
        np.testing.assert_allclose([p.logprob for p in ours.values()], [p.logprob for p in theirs.values()], atol=1e-5)
    assert whole_rows(llm) == rows


def test_scores_are_those_of_whole_rows(llm: LLM, reference: LLM) -> None:
    """A long chunk's logits have a place of their own, the last chunk's stay where a step's are."""
    text = [list(range(100, 160))]
    np.testing.assert_array_equal(llm.score(text)[0], reference.score(text)[0])
    assert whole_rows(llm) == len(text[0]) - CHUNK


def test_rows_until_the_graph_runs_again(llm: LLM, reference: LLM) -> None:
    out, wanted = (_step(x, 5).logits for x in (llm, reference))
    assert isinstance(out, DeviceLogits)
    assert isinstance(wanted, np.ndarray)
    assert (out.shape, len(out), len(out[0]), len(out[1:])) == (wanted.shape, 3, wanted.shape[1], 2)
    for i in range(3):
        np.testing.assert_array_equal(out[i].tokens, np.argsort(-wanted[i], kind="stable")[:MOST])
        np.testing.assert_array_equal(out[i].logits, wanted[i][out[i].tokens])
        for temperature in (1.0, 0.25):
            weights = np.exp((wanted[i] - wanted[i].max()).astype(np.float64) / temperature)
            np.testing.assert_allclose(out[i].sum(temperature), weights.sum(), rtol=SUM_ERROR)
    np.testing.assert_array_equal(out[1:][0].whole(), wanted[1])
    np.testing.assert_array_equal(np.asarray(out[1:]), wanted[1:])
    for outside in (lambda: out[1:][2], lambda: out[::2]):
        with pytest.raises(IndexError):
            outside()
    best = out[2].tokens.copy()
    _step(llm, 6)
    np.testing.assert_array_equal(out[2].tokens, best)  # what is on the host stays
    for late in (out[0].whole, lambda: out[0].sum(0.5)):
        with pytest.raises(RuntimeError, match="earlier step"):
            late()


def _step(llm: LLM, token: int) -> StepOutput:
    """Three sequences of one token."""
    runner = llm._runner
    assert runner is not None
    slots, one = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    context = np.zeros((3, runner.manifest.config.ngram_size - 1), np.int64)
    return runner.step(StepBatch(token + slots[:, None], slots, 0 * one, 0 * one, one, context, slots))


def test_logits_of_a_validation_are_arrays(engine_with_kernels: Path, machine: Machine) -> None:
    machine()
    engine = opening.open_graph("tensorrt", "body", engine_with_kernels, Manifest.read(engine_with_kernels))
    assert engine.whole_rows == 0
    assert engine._candidates is None
