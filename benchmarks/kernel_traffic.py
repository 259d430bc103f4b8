"""Memory traffic and launches of every kernel, counted by the host execution: the tables of docs/kernels.md.

    python benchmarks/kernel_traffic.py                   # official sizes, some minutes and gigabytes; no GPU
    python benchmarks/kernel_traffic.py --sizes small     # seconds, to try it
    python benchmarks/kernel_traffic.py --op gated_residual
    python benchmarks/kernel_traffic.py --op sparse_attention --step "prefill of 2048"

Needed: 32-byte sectors of inputs, weights, states and outputs, each once. Touched: distinct sectors that the launches
reach. Loaded: all bytes that threads ask for, caches included. The experts are as many as the tokens of the row use at
most (and not 512), so that memory holds them. Prints the tables and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_launches import CONFIGS, MAKERS, Launch, Step, make, sectors

from flashnext.export.config import ModelConfig
from flashnext.plugins.host_library import Execution, HostKernels, Report

DECODE, VERIFY, PREFILL, LONG = Step(1, 1, 4000), Step(1, 4, 4000), Step(1, 128), Step(1, 2048)
STEPS = {"decode": DECODE, "verification of 4": VERIFY, "prefill of 128": PREFILL, "prefill of 2048": LONG}
USUAL = [name for name, step in STEPS.items() if step is not LONG]
"""Without the step that takes minutes an op."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "gated_residual": [{}, {"state": "fp8"}, {"weights": "fp8"}],
    "ngram_injection": [{}],
    "gated_delta_net": [{}, {"state": "bf16"}],
    "sparse_attention": [{}, {"cache": "fp8"}],
    "sparse_moe": [{"weights": weights} for weights in ("bf16", "fp8", "nvfp4")],
    "candidates": [{}],
}
MOST_EXPERTS = 32


@dataclass(frozen=True)
class Row:
    """One launch, counted."""

    op: str
    form: str
    step: str
    needed: int
    report: Report

    @property
    def share(self) -> float:
        return self.report.sectors / self.needed


def rows(kernels: HostKernels, sizes: str, ops: Sequence[str], steps: Sequence[str]) -> Iterator[Row]:
    """Every form of these ops in these steps."""
    for op in ops:
        # Logits are made for the last token of a prompt, not for all.
        wanted = [name for name in steps if op != "candidates" or STEPS[name] not in (PREFILL, LONG)]
        for options in OPTIONS[op]:
            for name in wanted:
                launch = _launch(sizes, op, STEPS[name], options)
                report = kernels.launch(launch.op, launch.values, Execution(schedule="forward", watch="sectors"))
                form = ", ".join(f"{value.upper()} {what}" for what, value in options.items())
                yield Row(op, form, name, sectors(launch), report)


def _launch(sizes: str, op: str, step: Step, options: dict[str, Any]) -> Launch:
    c = CONFIGS[sizes]
    few = {"experts": min(MOST_EXPERTS, c.num_experts, c.num_experts_per_tok * step.tokens)}
    return make(sizes, op, step, torch.device("cpu"), **options, **(few if op == "sparse_moe" else {}))


def traffic_table(found: Sequence[Row]) -> str:
    lines = ["| op | step | launches | needed | touched | share | loaded |", "|" + " --- |" * 7]
    for row in found:
        name = f"{row.op}, {row.form}" if row.form else row.op
        r = row.report
        counts = f"{r.launches} | {row.needed:,} | {r.sectors:,} | {row.share:.3f} | {r.loaded_bytes / 1e6:.1f} MB"
        lines.append(f"| {name} | {row.step} | {counts} |")
    return "\n".join(lines)


def layer_table(found: Sequence[Row], c: ModelConfig) -> str:
    """Launches of a layer outside its dense projections: two gated residuals, the mixer, the experts."""
    per_op = {(row.op, row.step): row.report.launches for row in found}
    ngram = f"GDN layer with n-grams ({len(c.ngram_layers)} of them)"
    layers = {
        "GDN layer": ("gated_residual", "gated_delta_net", "gated_residual", "sparse_moe"),
        ngram: ("ngram_injection", "gated_residual", "gated_delta_net", "gated_residual", "sparse_moe"),
        "QSA layer": ("gated_residual", "sparse_attention", "gated_residual", "sparse_moe"),
    }
    steps = list(dict.fromkeys(row.step for row in found))
    lines = [f"| launches | {' | '.join(steps)} |", "|" + " --- |" * (1 + len(steps))]
    for layer, ops in layers.items():
        counts = [str(sum(per_op[op, step] for op in ops)) for step in steps]
        lines.append(f"| {layer} | {' | '.join(counts)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description="Count the kernels' memory traffic and launches.")
    parser.add_argument("--sizes", choices=CONFIGS, default="official", help="of the model (default: official)")
    parser.add_argument("--op", action="append", choices=MAKERS, help="only this op (may be repeated)")
    every = "only this step (may be repeated; default: all but the longest)"
    parser.add_argument("--step", action="append", choices=STEPS, help=every)
    options = parser.parse_args(arguments)
    found = []
    for row in rows(HostKernels.load(), options.sizes, options.op or list(MAKERS), options.step or USUAL):
        print(f"{row.op} {row.form} {row.step}: {row.share:.3f}", flush=True)
        found.append(row)
    print("\n" + traffic_table(found) + "\n")
    if not options.op:
        print(layer_table(found, CONFIGS[options.sizes]) + "\n")
    facts = [
        {"op": r.op, "form": r.form, "step": r.step, "needed_sectors": r.needed, "share": round(r.share, 4)}
        | r.report._asdict()
        for r in found
    ]
    print(json.dumps({"sizes": options.sizes, "rows": facts}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
