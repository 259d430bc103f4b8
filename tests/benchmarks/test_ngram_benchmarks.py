"""The benchmarks of the n-gram rows and the loop, on small tables: what they print last is what they measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import decode_loop
import ngram_memory
import ngram_rows
import pytest

from flashnext.runtime.model_runner import ModelRunner
from flashnext.runtime.ngram_core import library


def report(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    main()
    facts: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return facts


def test_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gigabytes", "0.01", "--rounds", "1", "--pause", "0"]
    facts = report(ngram_rows.main, monkeypatch, capsys, *words)
    assert len(facts["prompt"]) == len(facts["decode"]) == ngram_rows.COMPETITORS
    assert facts["decode_formats"].keys() == {ngram_rows.BF16, ngram_rows.FP8}
    assert facts["prompt"][ngram_rows.RIVAL]["ratio"] == 1


@pytest.mark.skipif(library.load() is None, reason="there is no C++ compiler here")
def test_a_table_under_a_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--gigabytes", "0.02", "--limit", "0.3", "--table", str(tmp_path / "table"), "--only", "decode step, cold"]
    facts = report(ngram_memory.main, monkeypatch, capsys, *words)
    assert len(facts["found"]) == 2
    assert all(found["rows"] == 300 * 16 for found in facts["found"].values())
    assert (tmp_path / "table").stat().st_size == int(0.02e9) // 320 * 320


def test_chunks_of_a_prompt() -> None:
    """Asked for ahead or with their step: all of them are gathered."""
    asked = decode_loop.measure_prompt(decode_loop.OneAfterTheOther, 0.0)
    ahead = decode_loop.measure_prompt(ModelRunner, 0.0)
    assert (asked["ahead"], ahead["ahead"]) == (0, decode_loop.CHUNKS - 1)
