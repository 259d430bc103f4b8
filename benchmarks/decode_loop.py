"""What the decode loop itself costs: steps over engines that only take time.

    python benchmarks/decode_loop.py                       # 1, 4 and 16 sequences; prints a table, then one JSON line
    python benchmarks/decode_loop.py --steps 100000        # whether time or memory grow over many steps

The engines stand for a device: a graph is handed over at once and takes a fixed time, one after the other, and the
body's results are waited for. Everything else is the real thing: scheduler, hashing and gathering of n-gram rows (16 of
320 bytes a token), greedy sampling over as many logits as a device would hand back candidates (512), the requests.
*Overhead* is a step's time less the two graphs'. *Rows* is how long the body was held up by its n-gram rows: nothing
where the head hides them. The second table is a prompt's chunks, whose body takes longer: how long they wait for their
rows when these are asked for with the chunk, and when they were asked for during the chunk before.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from ngram_rows import random_codes, spec_of

from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.manifest import CheckpointRef, GraphSpec, Manifest, TensorSpec
from flashnext.runtime.cli.parser import number_from, whole_number
from flashnext.runtime.cli.table import render
from flashnext.runtime.decode_loop import DecodeLoop
from flashnext.runtime.model_runner import ModelRunner, StepBatch, StepOutput
from flashnext.runtime.ngram import HostRows, Upcoming
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.request import Request
from flashnext.runtime.sampling_params import SamplingParams
from flashnext.runtime.scheduler import Scheduler

ROWS = "ngram_rows.1"
CHUNK, CHUNKS, CHUNK_BODY = 512, 40, 5e-3
TABLE_ROWS = 1_000_000
PROMPT = [1, 2, 3]


class Device:
    """Runs what it is given one after the other; `free_at` is when the last of it ends."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.held_up = 0.0
        """Seconds of the last body that the device stood still before it."""

    def add(self, seconds: float) -> None:
        now = time.perf_counter()
        self.held_up = max(now - self.free_at, 0.0)
        self.free_at = max(now, self.free_at) + seconds

    def wait(self) -> None:
        while time.perf_counter() < self.free_at:
            pass


class TimedEngine:
    """A graph of a device that takes `seconds`; `results` are what it returns once it has run, None for the head."""

    def __init__(self, spec: GraphSpec, device: Device, seconds: float, results: dict[str, Any] | None) -> None:
        self.spec, self._device, self._seconds, self._results = spec, device, seconds, results

    def bind(self, tensors: Mapping[str, Any]) -> None:
        """There is nothing to bind."""

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self._device.add(self._seconds)
        if self._results is None:
            return {}
        self._device.wait()
        rows = len(feeds["logit_rows"])
        return {name: value[:rows] for name, value in self._results.items()}


def manifest_of(batch: int) -> Manifest:
    step = [("token_ids", 2), ("slots", 1), ("past_len", 1), ("accepted", 1), ("new_len", 1), ("logit_rows", 1)]
    inputs = tuple(TensorSpec(name, "int32", ("B",) * rank, "step") for name, rank in step)
    rows = TensorSpec(ROWS, "bfloat16", ("B", "S", 2560), "rows")
    graphs = {"head": GraphSpec("head", inputs, (), {}), "body": GraphSpec("body", (*inputs, rows), (), {})}
    return Manifest(
        config=ModelConfig.from_dict(full_config(None)),
        dtype="bfloat16",
        window=8,
        capacity=1 << 20,
        slots=batch,
        residual_dtype="bfloat16",
        checkpoint=CheckpointRef("/nowhere", "0" * 64, "/nowhere"),
        graphs=graphs,
        weights=(),
        ngrams=(),
        ops={},
    )


class OneAfterTheOther(ModelRunner):
    """Asks for the rows of a step when it begins, and for no others."""

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput:
        return super().step(batch)


def runner_of(
    batch: int, head: float, body: float, kind: type[ModelRunner] = ModelRunner
) -> tuple[ModelRunner, Device]:
    """A runner over a device whose graphs take these times."""
    manifest, device = manifest_of(batch), Device()
    logits = np.random.default_rng(0).normal(size=(batch, manifest.config.vocab_size)).astype(np.float32)
    results = {"logits": logits, "hidden": np.zeros((batch, 1, 1, 1), np.float32)}
    engines = {
        "head": TimedEngine(manifest.graphs["head"], device, head, None),
        "body": TimedEngine(manifest.graphs["body"], device, body, results),
    }
    spec = spec_of(TABLE_ROWS, "plain")
    table = np.array_split(random_codes(TABLE_ROWS, 320).view(ml_dtypes.bfloat16), len(spec.shards))
    rows = HostRows(spec, NgramTable(spec, table, "bfloat16"), "bfloat16")
    return kind(manifest, engines, {}, {ROWS: rows}), device


def loop_of(batch: int, head: float, body: float, steps: int) -> tuple[DecodeLoop, Device, list[Request]]:
    """A loop in which `batch` requests have `steps` tokens to come."""
    runner, device = runner_of(batch, head, body)
    loop = DecodeLoop(runner, Scheduler(batch, runner.manifest.window, prefill_chunk=len(PROMPT)))
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    requests = [Request(runner.manifest, PROMPT, params, None) for _ in range(batch)]
    return loop, device, requests


def measure_prompt(kind: type[ModelRunner], head: float) -> dict[str, Any]:
    """How the chunks of one long prompt wait for their rows."""
    runner, _ = runner_of(1, head, CHUNK_BODY, kind)
    tokens = np.random.default_rng(0).integers(0, runner.manifest.config.vocab_size, CHUNK * CHUNKS).tolist()
    loop = DecodeLoop(runner, Scheduler(1, runner.manifest.window, CHUNK))
    loop.run([Request(runner.manifest, tokens, SamplingParams(max_tokens=1, temperature=0.0), None)])
    facts = runner.take_row_metrics().facts()
    runner.close()
    return {**facts["prefill_wait_ms"], "ahead": facts["chunks_fetched_ahead"]}


def measure(batch: int, head: float, body: float, steps: int) -> dict[str, float]:
    """Microseconds of overhead and of waiting for rows; growth from the second tenth of the steps to the last."""
    loop, device, requests = loop_of(batch, head, body, steps + 2 * batch)
    for request in requests:
        loop.add(request)
    for _ in range(2 * batch):  # prompts
        loop.advance()
    overhead, held_up = np.empty(steps), np.empty(steps)
    memory = 0
    for i in range(steps):
        start = time.perf_counter()
        loop.advance()
        overhead[i] = time.perf_counter() - start - head - body
        held_up[i] = device.held_up
        if i == steps // 5:
            memory = peak_memory()
    tenth = max(steps // 10, 1)
    return {
        "p50_us": float(np.median(overhead)) * 1e6,
        "p99_us": float(np.quantile(overhead, 0.99)) * 1e6,
        "rows_p50_us": float(np.median(held_up)) * 1e6,
        "growth": float(np.median(overhead[-tenth:]) / np.median(overhead[tenth : 2 * tenth])),
        "memory_growth_bytes": peak_memory() - memory,
    }


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=whole_number(10), default=5000, help="for each number of sequences (default: 5,000)")
    add(
        "--head",
        type=number_from(0, 1e6),
        default=50.0,
        metavar="US",
        help="microseconds of the head graph (default: 50)",
    )
    add(
        "--body",
        type=number_from(0, 1e6),
        default=500.0,
        metavar="US",
        help="microseconds of the body graph (default: 500)",
    )
    sequences = whole_number(1, 256)
    add("--batch", type=sequences, nargs="+", default=[1, 4, 16], help="numbers of sequences (default: 1 4 16)")
    arguments = parser.parse_args()
    found = {b: measure(b, arguments.head / 1e6, arguments.body / 1e6, arguments.steps) for b in arguments.batch}
    lines = [
        [str(b), *(f"{f[k]:.1f}" for k in ("p50_us", "p99_us", "rows_p50_us")), f"{f['growth']:.2f}",
         f"{f['memory_growth_bytes'] / 1e6:.1f}"]
        for b, f in found.items()
    ]  # fmt: skip
    print(
        render(["sequences", "overhead p50 us", "p99 us", "rows us", "growth", "memory growth MB"], lines), end="\n\n"
    )
    kinds = {"asked for with the chunk": OneAfterTheOther, "asked for a chunk before": ModelRunner}
    prompt = {name: measure_prompt(kind, arguments.head / 1e6) for name, kind in kinds.items()}
    lines = [[name, *(f"{f[q] * 1e3:,.0f}" for q in ("p50", "p99")), str(f["ahead"])] for name, f in prompt.items()]
    print(render([f"rows of {CHUNKS} chunks", "wait p50 below us", "p99", "chunks ahead"], lines), end="\n\n")
    print(
        json.dumps(
            {
                "prompt": prompt,
                "steps": arguments.steps,
                "head_us": arguments.head,
                "body_us": arguments.body,
                "found": found,
            }
        )
    )


if __name__ == "__main__":
    main()
