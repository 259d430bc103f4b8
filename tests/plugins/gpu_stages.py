"""The stages of scripts/gpu_check; run from the repository's root. Nothing here is collected by pytest."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gated_delta_net_case import OFFICIAL as DELTA
from gated_delta_net_case import Row, gated_delta_net_case
from gated_residual_case import OFFICIAL as RESIDUAL
from gated_residual_case import gated_residual_case
from kernel_checks import Case
from sparse_attention_case import OFFICIAL as ATTENTION
from sparse_attention_case import Row as AttentionRow
from sparse_attention_case import sparse_attention_case
from sparse_moe_case import OFFICIAL as EXPERTS
from sparse_moe_case import sparse_moe_case
from torch import Tensor

from flashnext.plugins.device_library import DeviceKernels, build

STAGES = ("build", "correct", "sanitize", "time")
BF16 = torch.bfloat16
ROTATE_BYTES = 512 << 20
"""Copies of a case's buffers together: several times an H200's 50 MB of L2."""
REPLAYS = 20
COPY_BYTES = 2 << 30


def timed_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """What stage `time` measures: batch 1 and 8, one token and four."""
    for batch, steps in ((1, 1), (1, 4), (8, 1)):
        shape = f"batch {batch}, {steps} tokens"
        tokens = batch * steps
        for state in ("plain", "static"):
            yield (
                f"gated_residual, {'FP8' if state == 'static' else 'BF16'} state, {shape}",
                lambda n=tokens, s=state: gated_residual_case("pending", tokens=n, **RESIDUAL, dtype=BF16, state=s),
            )
        yield (
            f"gated_delta_net, {shape}",
            lambda b=batch, s=steps: gated_delta_net_case([Row(40, 1, s)] * b, s, **DELTA, dtype=BF16),
        )
        for weights in ("plain", "fp8", "nvfp4"):
            yield (
                f"sparse_moe, {weights} weights, {shape}",
                lambda n=tokens, w=weights: sparse_moe_case(w, tokens=n, experts=10, **EXPERTS, dtype=BF16),
            )
    for context in (8192, 65536, 262143):
        yield (
            f"sparse_attention, context {context}",
            lambda c=context: sparse_attention_case("select", [AttentionRow(c, 1)], 1, dtype=BF16, **ATTENTION),
        )


# --- stages -----------------------------------------------------------------------------------------


def stage_build(results: dict[str, Any], dry: bool) -> bool:
    if dry and not shutil.which("nvcc"):
        print("build: nvcc is not here")
        return True
    start = time.perf_counter()
    build("90") if dry else build_for_gpu()
    results["build_s"] = round(time.perf_counter() - start, 1)
    return True


def stage_correct(results: dict[str, Any], dry: bool) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "tests/plugins", "--ignore=tests/plugins/test_host_execution.py"]
    command += ["--ignore=tests/plugins/test_sanitizers.py", "--ignore=tests/plugins/test_tensor_tile.py"]
    command += ["-m", "not slow"]
    return _run("correct", command, dry, results, FLASHNEXT_HOST_KERNELS="device")


def stage_sanitize(results: dict[str, Any], dry: bool) -> bool:
    command = ["compute-sanitizer", "--error-exitcode=1", sys.executable, "-m", "pytest", "-q", "tests/plugins"]
    command += ["-k", "neighbours or every_form or rows_without_tokens"]
    if not dry and not shutil.which("compute-sanitizer"):
        print("sanitize: compute-sanitizer is not here")
        return True
    return _run("sanitize", command, dry, results, FLASHNEXT_HOST_KERNELS="device")


def stage_time(results: dict[str, Any], dry: bool) -> bool:
    if dry:
        print("time:", *(name for name, _ in timed_cases()), sep="\n  ")
        return True
    ceiling = copy_rate()
    results["copy_gb_s"] = round(ceiling, 1)
    kernels = build_for_gpu()
    print("| case | microseconds | GB/s | share of a copy |", "| --- | --- | --- | --- |", sep="\n")
    for name, make in timed_cases():
        case = make()
        seconds = time_case(kernels, case)
        rate = needed_bytes(case) / seconds / 1e9
        print(f"| {name} | {seconds * 1e6:.2f} | {rate:.0f} | {rate / ceiling:.2f} |")
        results[name] = {"us": round(seconds * 1e6, 2), "gb_s": round(rate, 1), "share": round(rate / ceiling, 3)}
    return True


def _run(name: str, command: Sequence[str], dry: bool, results: dict[str, Any], **environment: str) -> bool:
    print(f"{name}:", " ".join([*(f"{k}={v}" for k, v in environment.items()), *command]))
    if dry:
        return True
    results[name] = subprocess.run(command, check=False, env={**os.environ, **environment}).returncode
    return bool(results[name] == 0)


# --- timing -----------------------------------------------------------------------------------------


def build_for_gpu() -> DeviceKernels:
    return DeviceKernels.load(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))


def needed_bytes(case: Case) -> int:
    """Inputs, weights, the slots' states in and out, outputs; of caches what the choice lets a query read."""
    values: dict[str, Tensor] = {n: v for n, v in case.values.items() if isinstance(v, Tensor)}
    batch = len(values["slots"]) if "slots" in values else 1
    total = 0
    for name, value in values.items():
        if name in ("key_state", "value_state"):
            total += min(2048, int(case.values["past_len"].max())) * value[0, 0].nbytes * batch
        elif name == "recurrent_state":
            total += 2 * batch * value[0].nbytes
        elif name.endswith("_state"):
            total += batch * value[0].nbytes
        else:
            total += value.nbytes
    return total


def time_case(kernels: DeviceKernels, case: Case) -> float:
    """Seconds of one launch: a CUDA graph over copies of all buffers, replayed."""
    copies = max(2, min(64, ROTATE_BYTES // max(1, needed_bytes(case))))
    values = [{n: v.cuda() if isinstance(v, Tensor) else v for n, v in case.values.items()} for _ in range(copies)]
    graph = torch.cuda.CUDAGraph()
    kernels.launch(case.op, values[0], torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for one in values:
            kernels.launch(case.op, one, torch.cuda.current_stream().cuda_stream)
    return _seconds(graph.replay) / copies


def copy_rate() -> float:
    """GB/s of a device copy, read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source)) / 1e9


def _seconds(work: Callable[[], object]) -> float:
    work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / REPLAYS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check and time the kernels on a GPU.")
    parser.add_argument("--stage", action="append", choices=STAGES, help="only this stage (may be repeated)")
    parser.add_argument("--dry-run", action="store_true", help="build for sm_90, print the plan")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_check: PyTorch sees no GPU here. Use --dry-run to build and to see the plan.", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"gpu": "none" if options.dry_run else torch.cuda.get_device_name()}
    stages = {"build": stage_build, "correct": stage_correct, "sanitize": stage_sanitize, "time": stage_time}
    outcomes = [stages[s](results, options.dry_run) for s in options.stage or STAGES]  # a failure ends none of them
    if not options.dry_run:
        folder = Path("benchmarks/results")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))
    return 0 if all(outcomes) else 1
