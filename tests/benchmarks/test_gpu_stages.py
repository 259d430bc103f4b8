"""scripts/gpu_check: limits hold, failures are reported and end nothing else, and the plan can be seen anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_stages
import pytest
import torch
from gpu_stages import LIMITS, USUAL, Command, run_limited

from flashnext.plugins import cuda_tools

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


def python(code: str) -> Command:
    return Command([sys.executable, "-c", code], {"WORD": "word"})


def test_all_stages_take_less_than_six_minutes() -> None:
    assert sum(LIMITS[stage] for stage in USUAL) < 360


def test_a_process_succeeds_or_fails() -> None:
    assert run_limited(python("import os; assert os.environ['WORD'] == 'word'"), 30) == ""
    assert run_limited(python("raise SystemExit(3)"), 30) == "exit status 3"


def test_a_process_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    start = time.monotonic()
    assert run_limited(python(code), 1.5) == "stopped after its limit of 2 s"
    assert time.monotonic() - start < 30
    time.sleep(4)
    assert not alive.exists()


def test_a_failed_stage_ends_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    def commands(stage: str, on: str, results: Path) -> list[Command]:
        write = f"import pathlib; pathlib.Path({str(results)!r}).write_text('{{\"a\": 1}}')"
        return [python(write if stage == "time" else "raise SystemExit(1)")]

    monkeypatch.setattr(gpu_stages, "commands", commands)
    code = gpu_stages.main(["--on", "host", "--stage", "build", "--stage", "time", "--results", str(tmp_path)])
    assert code == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["stages"]["build"]["reason"] == "exit status 1"
    assert found["stages"]["time"]["passed"]
    assert found["stages"]["time"]["results"] == {"a": 1}
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == found


def test_the_plan_is_printed_without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_tools, "toolkits", lambda: [tmp_path])
    assert gpu_stages.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "FLASHNEXT_HOST_KERNELS=device" in out
    assert "kernel_times.py --on device --sizes official" in out
    assert "pip install nvidia-cuda-sanitizer-api" in out
    assert "gpu_engines.py --output RESULTS" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named(capsys: Captured) -> None:
    assert gpu_stages.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(gpu_stages, "PACKAGES", (*gpu_stages.PACKAGES, "no_such_package", "nor_this"))
    assert gpu_stages.main([]) == 2
    assert "lacks no_such_package, nor_this. Install them" in capsys.readouterr().err


def test_packages_that_are_not_named_are_not_needed(tmp_path: Path) -> None:
    """What the stages would run is imported while all other packages of the extras are hidden."""
    hidden = ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "polygraphy", "safetensors", "matplotlib")
    (tmp_path / "hide.py").write_text(
        "import sys\n\n\nclass Hidden:\n    def find_spec(self, name, *rest):\n"
        f"        if name.split('.')[0] in {hidden}:\n            raise ModuleNotFoundError(name)\n\n\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    command = [
        *gpu_stages.pytest(workers=False),
        "-p",
        "hide",
        "--collect-only",
        *gpu_stages.correctness_tests("device"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    times = [sys.executable, "-c", "import hide, runpy; runpy.run_path('benchmarks/kernel_times.py')"]
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'benchmarks'}"
    subprocess.run(times, cwd=ROOT, env=environment, check=True)


def test_the_tests_that_a_gpu_leaves_out_exist() -> None:
    for name in gpu_stages.NOT_ON_A_GPU:
        assert (ROOT / "tests/plugins" / name).exists(), name


@pytest.mark.slow
def test_every_stage_runs_on_the_host(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_check", "--on", "host", "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    (file,) = tmp_path.iterdir()
    stages = json.loads(file.read_text())["stages"]
    assert stages["time"]["results"]["left_out"] == []
