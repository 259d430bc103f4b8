"""The export at the official sizes: time, memory and bytes stay far below those of the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.checkpoint.sparse_checkpoint import LAYOUTS

BENCHMARK = Path(__file__).parents[3] / "benchmarks/export_full_size.py"


def figures(*options: str) -> dict[str, Any]:
    """What the benchmark measured (it also runs onnx.checker on every graph and fails where that fails)."""
    run = subprocess.run([sys.executable, BENCHMARK, *options], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])["figures"][-1]
    return result


def test_four_layers() -> None:
    found = figures("--layers", "4")
    assert found["checkpoint_bytes"] > 100e9
    assert found["peak_bytes"] < 1.5 * 2**30
    assert found["written_bytes"] < 30e6


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_whole_model(layout: str) -> None:
    found = figures("--layers", "48", "--layout", layout)
    assert found["checkpoint_bytes"] > 125e9
    assert found["cpu_seconds"] < 150  # on a machine with nothing else to do, the time it takes
    assert found["peak_bytes"] < 3 * 2**30
    assert found["written_bytes"] < 300e6
