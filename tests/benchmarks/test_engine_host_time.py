"""The benchmark runs on a machine without a GPU, and its stand-ins are all that the engine asks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/engine_host_time.py"


def test_the_host_work_of_a_step_is_measured(random_bundle: Path) -> None:
    command = [sys.executable, SCRIPT, random_bundle, "--batch", "2", "--steps", "10"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(run.stdout.splitlines()[-1])
    assert facts["batch"] == 2
    assert 0 < facts["step_us"] < 1e6
    assert 0 < facts["whole_rows_us"] < 1e6
    assert 0 < facts["device_rows_us"] < 1e6
