"""The stages of scripts/gpu_check: processes with a limit of time; the failure of one ends none of the others.

| stage | what it runs | seconds at most |
| --- | --- | --- |
| build | nvcc for the GPU at hand | 110 |
| correct | tests/plugins on the GPU against PyTorch, official sizes included | 90 |
| sanitize | compute-sanitizer (memcheck, then racecheck) over one small case of every op | 60 |
| time | benchmarks/kernel_times.py | 90 |
| engines | benchmarks/gpu_engines.py: plugin library, engine, golden check, tokens, logits, either gatherer | 480 |
| providers | benchmarks/gpu_providers.py: ONNX Runtime's providers against PyTorch, layer by layer | 240 |

The last two run only when they are named (`--stage engines`): compiling the plugin library takes minutes, and not every
machine has ONNX Runtime for GPUs.
With `--on host` the same stages run the host execution of the kernels on a machine without a GPU, with limits ten times
as long: that is how they are tested. What a stage prints goes through; the results of all are one JSON line, kept under
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.export.errors import PluginError
from flashnext.plugins.cuda_tools import find_tool

ROOT = Path(__file__).parents[1]
LIMITS = {"build": 110, "correct": 90, "sanitize": 60, "time": 90, "engines": 480, "providers": 240}
"""Seconds of each stage."""
USUAL = ("build", "correct", "sanitize", "time")
"""The stages that run unless some are named: 350 s together."""
HOST_FACTOR = 10
MARGIN = 0.1
"""Part of its limit that the timing stage leaves for its last case."""
MAX_WORKERS = 8
SANITIZERS = ("memcheck", "racecheck")
PACKAGES = ("torch", "numpy", "ml_dtypes", "filelock", "pytest", "hypothesis", "tokenizers", "tqdm")
"""What the stages import; transformers for one test more, pytest-xdist for several processes."""
NOT_ON_A_GPU = (
    "test_host_execution.py",
    "test_device_check.py",
    "test_fragment_layouts.py",
    "test_tensor_tile.py",
    "test_sanitizers.py",
    "plugin_library",
)
"""Tests of the host execution, of the compiler's output, and of the TensorRT library around the kernels."""
BUILD = {
    "device": "from flashnext.plugins.device_library import build, gpu_target; print(build(gpu_target()))",
    "host": "from flashnext.plugins.host_build import build; print(build())",
    "dry": "from flashnext.plugins.device_library import build; print(build('90'))",
}


@dataclass(frozen=True)
class Command:
    """One process of a stage."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments])


def limit_of(stage: str, on: str) -> float:
    """Seconds that a stage may take on "device" or "host"."""
    return LIMITS[stage] * (HOST_FACTOR if on == "host" else 1)


def commands(stage: str, on: str, results: Path) -> Iterator[Command]:
    """The processes of a stage, on "device" or "host"; the timing stage writes its results to a file."""
    kernels = {"FLASHNEXT_HOST_KERNELS": "device" if on == "device" else "plain"}
    if stage == "build":
        yield Command([sys.executable, "-c", BUILD[on]])
    elif stage == "correct":
        yield Command([*pytest(), *correctness_tests(on)], kernels)
    elif stage == "sanitize" and on == "device":
        # PyTorch asks CUDA about pointers that it knows nothing of, and expects the error.
        sanitizer = [str(find_tool("compute-sanitizer")), "--error-exitcode=1", "--report-api-errors=no"]
        for tool in SANITIZERS:
            yield Command([*sanitizer, f"--tool={tool}", *pytest(workers=False), *small_cases()], kernels)
    elif stage == "sanitize":
        yield Command([*pytest(workers=False), *small_cases()], {"FLASHNEXT_HOST_KERNELS": "address"})
    elif stage == "time":
        budget = limit_of(stage, on) * (1 - MARGIN)
        sizes = "official" if on == "device" else "small"
        script = [sys.executable, str(ROOT / "benchmarks/kernel_times.py"), "--on", on, "--sizes", sizes]
        yield Command([*script, "--budget", f"{budget:.0f}", "--output", str(results)])
    elif stage == "engines" and on == "device":
        yield Command([sys.executable, str(ROOT / "benchmarks/gpu_engines.py"), "--output", str(results)])
    elif stage == "providers" and on == "device":
        yield Command([sys.executable, str(ROOT / "benchmarks/gpu_providers.py"), "--output", str(results)])
    elif stage == "providers":
        yield Command([*pytest(workers=False), *played_device()])
    elif stage == "engines":
        yield Command([*pytest(workers=False), *played_engine()])


def pytest(workers: bool = True) -> list[str]:
    """pytest on several processes where pytest-xdist is installed: most of the time goes to the reference."""
    parallel = ["-n", str(min(os.cpu_count() or 1, MAX_WORKERS))]
    found = workers and importlib.util.find_spec("xdist") is not None
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(parallel if found else [])]


def correctness_tests(on: str) -> list[str]:
    """All kernel tests; without a GPU, where they take minutes, those of one op."""
    if on == "host":
        return ["tests/plugins/test_candidates.py", "-k", "minus_infinity or refused"]
    left_out = [f"--ignore=tests/plugins/{name}" for name in NOT_ON_A_GPU]
    return ["tests/plugins", *left_out, "-m", "not slow"]


def played_engine() -> list[str]:
    """The TensorRT engine with GPU and TensorRT played by stand-ins, rows gathered by either."""
    folder = "tests/runtime/engines/tensorrt"
    files = [f"{folder}/test_engine.py", f"{folder}/test_device_rows.py"]
    return [*files, "-k", "tokens_are_those and not (fp8 or nvfp4)"]


def played_device() -> list[str]:
    """What a provider binds on a device, in the CPU's memory."""
    return ["tests/runtime/engines/test_onnxruntime_providers.py", "-k", "copies or names_and_pairs"]


def small_cases() -> list[str]:
    return ["tests/plugins/test_sanitizers.py", "-k", "small_case"]


# --- running ----------------------------------------------------------------------------------------


def run_stage(stage: str, on: str) -> dict[str, Any]:
    """Run a stage's processes one after the other; what came of it."""
    start, limit = time.monotonic(), limit_of(stage, on)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        outcome: dict[str, Any] = {"passed": True}
        try:
            for command in commands(stage, on, results):
                status = run_limited(command, limit - (time.monotonic() - start))
                if status:
                    outcome = {"passed": False, "reason": status}
                    break
        except PluginError as error:
            outcome = {"passed": False, "reason": str(error)}
        outcome["seconds"] = round(time.monotonic() - start, 1)
        if results.exists():
            outcome["results"] = json.loads(results.read_text(encoding="utf-8"))
    return outcome


def run_limited(command: Command, limit: float) -> str:
    """Run a process and everything that it starts; "" or what went wrong."""
    print(f"$ {command}", flush=True)
    environment = {**os.environ, **command.environment}
    with subprocess.Popen(command.arguments, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(max(limit, 1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(stopped, KeyboardInterrupt):
                raise
            return f"stopped after its limit of {limit:.0f} s"
    return f"exit status {code}" if code else ""


def missing_packages() -> list[str]:
    """Those of PACKAGES that this Python lacks."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def gpu_name() -> str:
    """The first GPU as PyTorch names it; "" if there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def dry_run(stages: Sequence[str], on: str) -> int:
    """Print every command, and build for sm_90 where nvcc is."""
    for stage in stages:
        print(f"{stage} (at most {limit_of(stage, on):.0f} s):")
        try:
            print(*(f"  {command}" for command in commands(stage, on, Path("RESULTS"))), sep="\n")
        except PluginError as error:
            print(f"  {error}")
    try:
        find_tool("nvcc")
    except PluginError as error:
        print(f"build for sm_90: {error}")
        return 0
    return 1 if run_limited(Command([sys.executable, "-c", BUILD["dry"]]), 600) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every stage passed, 1: one did not, 2: they cannot run here."""
    parser = argparse.ArgumentParser(description="Build, check and time the kernels on a GPU.")
    parser.add_argument("--stage", action="append", choices=LIMITS, help="only this stage (may be repeated)")
    parser.add_argument("--on", choices=("device", "host"), default="device", help="host: try the stages without a GPU")
    parser.add_argument("--dry-run", action="store_true", help="build for sm_90, print the plan")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", help="folder of the results")
    options = parser.parse_args(arguments)
    if options.dry_run:
        return dry_run(options.stage or list(LIMITS), options.on)
    if missing := missing_packages():
        print(f"gpu_check: this Python ({sys.executable}) lacks {', '.join(missing)}. Install them, "
              "or run this with a Python that has them.", file=sys.stderr)  # fmt: skip
        return 2
    stages = options.stage or list(USUAL)
    name = gpu_name() if options.on == "device" else "host execution"
    if not name:
        print("gpu_check: PyTorch sees no GPU here. --dry-run builds and prints the plan.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"on": name, "stages": {}}
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for stage in stages:
        found["stages"][stage] = run_stage(stage, options.on)
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for stage, outcome in found["stages"].items():
        what = "passed" if outcome["passed"] else f"FAILED: {outcome['reason']}"
        print(f"{stage}: {what} ({outcome['seconds']} s)")
    print(json.dumps(found))
    return 0 if all(outcome["passed"] for outcome in found["stages"].values()) else 1
