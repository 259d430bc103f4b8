"""The benchmark compares both ways of sampling, token by token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/sampling_time.py"


def test_both_ways_are_measured() -> None:
    command = [sys.executable, SCRIPT, "--vocabulary", "5000", "--rows", "4"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["sampling"]["greedy"]["rows_asked_for"] == 0
    assert facts["sampling"]["temperature 1 and nothing else"]["rows_asked_for"] == 4
    assert all(found["largest_us"] > 0 for found in facts["sampling"].values())
