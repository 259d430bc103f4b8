"""`flashnext validate` on a sound bundle, and its verdict when the tolerance is not kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.main import main


def test_sound_bundle_passes(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(random_bundle), "--tokens", "70", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert {row["graph"] for row in report["outputs"]} == set(Manifest.read(random_bundle).graphs)
    assert {row["step"] for row in report["outputs"]} == {"prefill", "decode", "verify", "after verify", "draft"}


def test_error_above_the_tolerance_ends_with_1(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(random_bundle), "--tolerance", "0"]) == 1
    captured = capsys.readouterr()
    assert "DIFFERS" in captured.out
    assert "differ by more than the tolerance" in captured.err


def test_differences_leave_one_json_object(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(random_bundle), "--tolerance", "0", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_tolerance_that_is_none(random_bundle: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(random_bundle), f"--tolerance={value}"]) == 2
    assert "must be a finite number, 0 or more" in capsys.readouterr().err


def test_prefill_that_does_not_fit(random_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(random_bundle), "--tokens", "1000"]) == 2
    assert "Choose --tokens from 9 to 250" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--engine-path", "nowhere"), "engine_path is for the engines tensorrt and tensorrt-rtx, which take no part"),
        (("--plugins", "library.so"), "plugins is for the engines tensorrt and tensorrt-rtx, which take no part"),
        (("--threads", "1000000"), "expected a whole number from 1 to 1024"),
    ],
)
def test_options_that_are_refused(
    random_bundle: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(random_bundle), *words]) == 2
    assert sentence in capsys.readouterr().err


def test_bundle_after_an_option_of_several_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--engine", "onnxruntime", "bundle"]) == 2
    assert "BUNDLE goes before --engine, which takes all words after it" in capsys.readouterr().err
