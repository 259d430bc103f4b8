"""Time of every kernel at official sizes, beside the rate of a plain copy, and of a whole model's decode step.

    python benchmarks/kernel_times.py                              # on a GPU: some minutes
    python benchmarks/kernel_times.py --case gated_residual        # cases whose names hold this
    python benchmarks/kernel_times.py --on host --sizes small      # without a GPU: the same path through the host
                                                                   # execution; its times say nothing about a GPU

A case is launched over copies of all its buffers, which together are far larger than the caches, as one CUDA graph that
is replayed; the table has the median of several rounds. So a launch may load its weights while its predecessor ends, as
it does in a model. GB/s counts the bytes that the op has to move, and the share is of the measured rate of a copy.
The sum over a model's decode step multiplies the measured times by how often each part runs; activations between the
ops (sigmoid, products of the shared expert) are not in it. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from kernel_launches import CONFIGS, Source, Step, make
from timing_backends import BACKENDS, Backend

from flashnext.export.config import LINEAR_ATTENTION, ModelConfig
from flashnext.runtime.cli.parser import number_from, output_file

BATCHES, STEPS = (1, 8), (1, 4)
PREFILL = {"official": (2048, 8192), "small": (70,)}
CONTEXTS = {"official": (8192, 65536, 262144, 1048576), "small": (40, 120)}
LONG_PREFILL = {"official": (2048, 1048576 - 2048), "small": (70, 120)}
"""Tokens of a step far into a text, and the tokens before them."""
ROUNDS = 5
MOST_REPLAYS = 100
FORMATS: dict[str, list[dict[str, str]]] = {
    "gated_residual": [{"state": "bf16"}, {"state": "fp8"}, {"weights": "fp8"}],
    "ngram_injection": [{"state": "bf16"}, {"state": "fp8"}],
    "sparse_moe": [{"weights": weights} for weights in ("bf16", "fp8", "nvfp4")],
}


@dataclass(frozen=True)
class Case:
    """An op (or dense products) in one step and format."""

    op: str
    step: Step
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        formats = [f"{value.upper()} {what}" for what, value in self.options.items()]
        context = [f"context {self.step.past}"] if self.op == "sparse_attention" else []
        return ", ".join([self.op, *formats, f"batch {self.step.batch}", f"{self.step.steps} tokens", *context])


@dataclass(frozen=True)
class Work:
    """What is timed, the bytes that it has to move, and the memory that it holds."""

    run: Callable[[], object]
    moved: int
    held: int


@dataclass(frozen=True)
class Result:
    """Microseconds of one launch (median, and the spread of the rounds as a share of it)."""

    us: float
    spread: float
    gb_s: float
    share: float


# --- cases ------------------------------------------------------------------------------------------


def dense_shapes(c: ModelConfig) -> dict[str, list[tuple[int, int]]]:
    """Inputs and outputs of the products around the ops: what cuBLAS does."""
    h, heads, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    values, shared = c.linear_num_value_heads, c.shared_expert_intermediate_size
    gdn = [c.linear_conv_dim, c.linear_value_dim, values, values]
    qsa = [2 * heads, kv, kv, (c.indexer_n_heads + 1) * c.indexer_head_dim]
    return {
        "dense of a GDN layer": [*((h, out) for out in gdn), (c.linear_value_dim, h)],
        "dense of a QSA layer": [*((h, out) for out in qsa), (heads, h)],
        "router and shared expert": [(h, c.num_experts), (h, shared), (h, shared), (shared, h), (h, 1)],
        "dense of n-grams": [(c.ple_embed_dim, c.hc_count * h), (c.ple_embed_dim, h)],
        "LM head": [(h, c.vocab_size)],
    }


def model_cases(sizes: str) -> list[tuple[int, Case]]:
    """How often each case runs in a decode step of the model at batch 1, with FP8 experts and BF16 dense weights."""
    c, one = CONFIGS[sizes], Step(1, 1, CONTEXTS[sizes][0])
    linear = sum(kind == LINEAR_ATTENTION for kind in c.layer_types)
    sparse, layers, ngrams = c.num_hidden_layers - linear, c.num_hidden_layers, len(c.ngram_layers)
    dense = dict(zip(dense_shapes(c), (linear, sparse, layers, ngrams, 1), strict=True))
    return [
        (2 * layers + 1, Case("gated_residual", one, {"state": "bf16"})),
        (ngrams, Case("ngram_injection", one, {"state": "bf16"})),
        (linear, Case("gated_delta_net", one)),
        (sparse, Case("sparse_attention", one)),
        (layers, Case("sparse_moe", one, {"weights": "fp8"})),
        (1, Case("candidates", one)),
        *((count, Case(name, one)) for name, count in dense.items()),
    ]


def all_cases(sizes: str) -> list[Case]:
    """The model's decode step first, so that a budget cuts the rest."""
    contexts, past = CONTEXTS[sizes], CONTEXTS[sizes][0]
    short = [Step(batch, steps, past) for batch in BATCHES for steps in STEPS]
    prefill = [Step(1, steps) for steps in PREFILL[sizes]]
    cases = [case for _, case in model_cases(sizes)]
    for steps in (short, prefill):
        for op in ("gated_residual", "ngram_injection", "gated_delta_net", "sparse_moe"):
            cases += [Case(op, step, options) for step in steps for options in FORMATS.get(op, [{}])]
    steps = [Step(b, s, context - s) for context in contexts for b in BATCHES for s in STEPS]
    length, long_past = LONG_PREFILL[sizes]
    cases += [Case("sparse_attention", step) for step in (*steps, *prefill, Step(1, length, long_past))]
    cases += [Case("sparse_attention", Step(1, 1, context - 1), {"cache": "fp8"}) for context in contexts]
    cases += [Case("candidates", step) for step in short[1:]]
    return list({case.name: case for case in cases}.values())


def make_work(backend: Backend, sizes: str, case: Case, seed: int) -> Work:
    """The case's buffers, and what to run over them."""
    shapes = dense_shapes(CONFIGS[sizes])
    if case.op in shapes:
        source, tokens = Source(backend.device, seed), case.step.tokens
        pairs = [(source.normal(tokens, i), source.normal(o, i, scale=i**-0.5)) for i, o in shapes[case.op]]
        moved = sum(x.nbytes + w.nbytes + tokens * len(w) * 2 for x, w in pairs)
        return Work(lambda: [torch.nn.functional.linear(x, w) for x, w in pairs], moved, moved)
    launch = make(sizes, case.op, case.step, backend.device, seed, **case.options)
    held = sum(v.nbytes for v in launch.values.values() if isinstance(v, torch.Tensor))
    return Work(lambda: backend.launch(launch.op, launch.values), launch.moved, held)


# --- measuring --------------------------------------------------------------------------------------


def measure(backend: Backend, sizes: str, case: Case, ceiling: float) -> Result:
    """Time one case; `ceiling` is the rate of a copy in bytes per second."""
    works = [make_work(backend, sizes, case, 0)]
    backend.seconds(works[0].run, 1)  # loads the kernels, grows the workspace
    wanted = max(2, min(backend.most_copies, math.ceil(backend.rotate_bytes / works[0].moved)))
    copies = max(1, min(wanted, backend.memory_bytes // works[0].held))
    works += [make_work(backend, sizes, case, seed) for seed in range(1, copies)]
    replay = backend.capture(lambda: [work.run() for work in works])
    backend.seconds(replay, 1)  # a graph's first replay also brings it to the device
    times = max(1, min(MOST_REPLAYS, int(backend.round_seconds / max(backend.seconds(replay, 1), 1e-9))))
    rounds = sorted(backend.seconds(replay, times) / copies for _ in range(ROUNDS))
    median, moved = rounds[ROUNDS // 2], sum(work.moved for work in works) / copies
    rate = moved / median
    spread = (rounds[-1] - rounds[0]) / median
    return Result(round(median * 1e6, 2), round(spread, 3), round(rate / 1e9, 1), round(rate / ceiling, 3))


def copy_rate(backend: Backend) -> float:
    """Bytes per second of a copy on the device, read and written."""
    source = torch.ones(backend.copy_bytes // 4, device=backend.device)
    target = torch.empty_like(source)
    backend.seconds(lambda: target.copy_(source), 1)
    return 2 * source.nbytes / min(backend.seconds(lambda: target.copy_(source), 5) for _ in range(ROUNDS))


def measure_all(
    backend: Backend, sizes: str, cases: Sequence[Case], ceiling: float, budget: float
) -> Iterator[tuple[str, Result | None]]:
    """Every case that fits the budget of seconds; None for those that are left out."""
    end = time.perf_counter() + budget
    for case in cases:
        if time.perf_counter() > end:
            yield case.name, None
            continue
        yield case.name, measure(backend, sizes, case, ceiling)
        backend.release()


# --- the whole model --------------------------------------------------------------------------------


def model_sum(sizes: str, found: Mapping[str, Result], state: str) -> tuple[list[tuple[str, int, float]], float | None]:
    """(case, how often, microseconds together) and the sum in ms; None if a part was not measured."""
    rows = []
    for count, case in model_cases(sizes):
        options = case.options | ({"state": state} if "state" in case.options else {})
        name = Case(case.op, case.step, options).name
        rows.append((name, count, count * found[name].us if name in found else math.nan))
    total = sum(us for _, _, us in rows) / 1e3
    return rows, None if math.isnan(total) else round(total, 3)


def print_sum(sizes: str, found: Mapping[str, Result]) -> dict[str, float | None]:
    """The decode step with a BF16 and with an FP8 residual."""
    sums = {}
    for state in ("bf16", "fp8"):
        rows, sums[f"{state} residual"] = model_sum(sizes, found, state)
        print(f"\nDecode of the whole model at batch 1, {state.upper()} residual, FP8 experts, BF16 dense weights:\n")
        print("| part | times | microseconds |", "| --- | --- | --- |", sep="\n")
        for name, count, us in rows:
            print(f"| {name} | {count} | {'not measured' if math.isnan(us) else format(us, '.1f')} |")
        total = sums[f"{state} residual"]
        print(f"| together | | {'not all measured' if total is None else f'{total * 1e3:.1f}'} |")
    return sums


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time the kernels at a model's sizes.")
    parser.add_argument("--on", choices=BACKENDS, default="device", help="a GPU, or the host execution (to try this)")
    parser.add_argument("--sizes", choices=CONFIGS, default="official", help="of the model (default: official)")
    parser.add_argument("--case", action="append", help="only cases whose names hold this (may be repeated)")
    parser.add_argument(
        "--budget",
        type=number_from(-math.inf, math.inf),
        default=math.inf,
        help="seconds after which cases are left out (below 0: all)",
    )
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--output", type=output_file, help="also write the JSON here, after every case")
    options = parser.parse_args(arguments)
    cases = [c for c in all_cases(options.sizes) if any(part in c.name for part in options.case or [""])]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    backend = BACKENDS[options.on]()
    ceiling = copy_rate(backend)
    facts: dict[str, Any] = {"on": backend.name, "sizes": options.sizes, "copy_gb_s": round(ceiling / 1e9, 1)}
    found: dict[str, Result] = {}
    facts |= {"times": {}, "left_out": []}
    print(f"{backend.name}: a copy moves {ceiling / 1e9:.0f} GB/s\n")
    print("| case | microseconds | spread | GB/s | share of a copy |", "| --- | --- | --- | --- | --- |", sep="\n")
    for name, result in measure_all(backend, options.sizes, cases, ceiling, options.budget):
        if result:
            found[name] = result
            facts["times"][name] = asdict(result)
            print(f"| {name} | {result.us} | {result.spread} | {result.gb_s} | {result.share} |", flush=True)
        else:
            facts["left_out"].append(name)
        if options.output:
            options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    facts["decode_ms"] = print_sum(options.sizes, found)
    if options.output:
        options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
