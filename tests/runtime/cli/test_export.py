"""`flashnext export` hands its options on; what it writes is tested with the exporter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.graphs import bundle
from flashnext.export.graphs.bundle import ExportOptions
from flashnext.runtime.cli.main import main


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `export_bundle` was called with, in place of a slow export."""
    calls: list[Any] = []

    def export_bundle(checkpoint: str, target: str, options: ExportOptions, **listeners: Any) -> None:
        listeners["note"]("Skipped 3 vision tensors.")
        listeners["progress"]("body")
        calls.append((checkpoint, target, options))

    monkeypatch.setattr(bundle, "export_bundle", export_bundle)
    return calls


def test_defaults_are_the_exporters(exported: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "ckpt", "out"]) == 0
    assert exported == [("ckpt", "out", ExportOptions())]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[0] == "flashnext: Skipped 3 vision tensors."
    assert "exported to out in" in captured.err


def test_every_option_arrives(exported: list[Any]) -> None:
    options = "--window 4 --capacity 64 --slots 2 --indexer-budget 32 --dtype bfloat16 --rope-scaling yarn:2"
    options += " --residual fp8 --scales scales.json"
    assert main(["export", "ckpt", "out", *options.split(), "--beside", "--overwrite"]) == 0
    expected = ExportOptions(
        4, 64, 2, "bfloat16", indexer_budget=32, rope_scaling={"rope_type": "yarn", "factor": 2.0}, beside=True,
        overwrite=True, residual_form="fp8", scales="scales.json",
    )  # fmt: skip
    assert exported[0][2] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "9999999"], "--capacity 9999999 is outside 1 … 4096"),
        (["--indexer-budget", "33"], "indexer_budget = 33 is not a multiple"),
        (["--rope-scaling", '{"rope_type": "linear"}'], "'linear' is not one of"),
        (["--rope-scaling", "yarn:0"], "factor = 0.0 is outside"),
        (["--rope-scaling", '{"rope_type": "yarn", "factor": 1' + "0" * 400 + "}"], "factor must be a finite number"),
        (["--indexer-budget", str(4 * 10**11)], "indexer_budget = 400000000000 is outside"),
    ],
)
def test_option_that_does_not_fit_the_model(
    options: list[str], words: str, random_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(random_checkpoint), str(tmp_path / "bundle"), *options]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "bundle")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_export_leaves_nothing(number: int, code: int, random_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashnext.runtime.cli.main", "export", random_checkpoint, tmp_path / "bundle"]
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    while process.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.05)
    assert process.poll() is None, "the export ended before it could be interrupted"
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
