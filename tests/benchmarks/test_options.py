"""Numbers that a benchmark cannot measure with are refused before it begins, as by any command."""

from __future__ import annotations

import importlib
import sys

import pytest

WRONG = [
    ("decode_loop", "--steps", "0", "a whole number at least 10"),
    ("decode_loop", "--batch", "0", "a whole number from 1 to 256"),
    ("decode_loop", "--head", "-1", "a number from 0"),
    ("ngram_rows", "--rounds", "0", "a whole number at least 1"),
    ("ngram_rows", "--gigabytes", "0", "a number from 0.001"),
    ("ngram_rows", "--pause", "nan", "a number from 0"),
    ("ngram_memory", "--gigabytes", "inf", "a number from 0.001"),
    ("ngram_memory", "--limit", "0", "a number from 0.05"),
    ("assemble_experts", "--rounds", "0", "a whole number at least 1"),
    ("assemble_experts", "--gigabytes", "nan", "a number from 0.001"),
    ("export_full_size", "--layers", "0", "a whole number from 1"),
    ("delta_rule_precision", "--tokens", "0", "a whole number at least 1"),
    ("build_engines", "--target", "0", "a whole number at least 1"),
    ("kernel_times", "--budget", "nan", "a number from -inf to inf"),
]


@pytest.mark.parametrize(("benchmark", "option", "value", "expected"), WRONG)
def test_numbers_out_of_range(
    benchmark: str, option: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [benchmark, option, value])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(benchmark).main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: expected {expected}" in error
    assert f"found {value}" in error
