"""Corrupted checkpoints and bundles (see fuzzing/): one-sentence errors, nothing else. `scripts/fuzz` runs more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Every thread of a linear algebra library would take address space of its own."""
FUZZING = Path(__file__).parent / "fuzzing"
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc to limit memory")


def run(checkpoint: Path, bundle: Path, cases: int) -> None:
    command = [sys.executable, FUZZING, "--checkpoint", checkpoint, "--bundle", bundle, "--cases", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_300_cases(random_checkpoint: Path, random_bundle: Path) -> None:
    run(random_checkpoint, random_bundle, 300)


@pytest.mark.slow
def test_2000_cases(random_checkpoint: Path, random_bundle: Path) -> None:
    run(random_checkpoint, random_bundle, 2000)
