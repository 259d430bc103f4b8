"""Host time of sampling a token: from a whole row of logits, and from the row's largest (runtime/shortlist.py).

    python benchmarks/sampling_time.py [--vocabulary 248320] [--rows 50]

Rows are like a language model's: logits fall with the logarithm of their rank, the likeliest token has about 0.4.
Both ways give the same tokens, or the benchmark fails. Prints a table and ends with one JSON line; figures are medians,
in microseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from flashnext.runtime.cli.parser import whole_number
from flashnext.runtime.cli.table import render
from flashnext.runtime.logits import Floats
from flashnext.runtime.sampler import Sampler
from flashnext.runtime.sampling_params import SamplingParams

LARGEST, PROMPT = 256, 500
SLOPE, NOISE = 1.5, 0.3
NEUTRAL = {"temperature": 1.0, "top_k": -1, "top_p": 1.0}
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "the same, presence penalty 1.5": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "presence_penalty": 1.5},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.8": {"top_p": 0.8},
    "temperature 1 and nothing else": {},
}


class Row:
    """A row whose largest logits a device has picked."""

    def __init__(self, logits: Floats) -> None:
        self.every = logits
        self.tokens = np.argsort(-logits, kind="stable")[:LARGEST].astype(np.int32)
        self.logits = logits[self.tokens]
        self._sum = float(np.exp((logits - logits.max()).astype(np.float64)).sum())
        self.asked = False

    def sum(self, temperature: float) -> float:
        assert temperature == 1.0
        return self._sum

    def whole(self) -> Floats:
        self.asked = True
        return self.every

    def __len__(self) -> int:
        return len(self.every)


def make_rows(count: int, vocabulary: int) -> list[Row]:
    generator = np.random.default_rng(0)
    falling = -SLOPE * np.log(np.arange(1, vocabulary + 1))
    noise = NOISE * generator.normal(size=(count, vocabulary))
    return [Row(generator.permutation(falling + row).astype(np.float32)) for row in noise]


def measure(sampler: Sampler, logits: Sequence[Any]) -> tuple[list[int], float]:
    """Tokens, and microseconds of one."""
    tokens, times = [], []
    for row in logits:
        start = time.perf_counter()
        tokens.append(sampler.sample(row))
        times.append(time.perf_counter() - start)
    return tokens, median(times) * 1e6


def run(rows: Sequence[Row], wishes: dict[str, Any]) -> dict[str, float]:
    """Both ways on the same rows."""
    sampling = SamplingParams(**NEUTRAL | wishes).sampling({})
    for row in rows:
        row.asked = False
    tokens, whole = measure(Sampler(sampling, range(PROMPT), seed=1), [row.every for row in rows])
    again, largest = measure(Sampler(sampling, range(PROMPT), seed=1), rows)
    assert tokens == again
    return {"whole_us": whole, "largest_us": largest, "rows_asked_for": sum(row.asked for row in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Host time of sampling a token.")
    vocabulary = "logits of a row (default: 248320)"
    parser.add_argument("--vocabulary", type=whole_number(PROMPT), default=248_320, help=vocabulary)
    parser.add_argument("--rows", type=whole_number(1), default=50, help="rows (default: 50)")
    options = parser.parse_args()
    rows = make_rows(options.rows, options.vocabulary)
    found = {name: run(rows, wishes) for name, wishes in WISHES.items()}
    lines = [
        [name, f"{r['whole_us']:.0f}", f"{r['largest_us']:.0f}", f"{r['rows_asked_for']} of {len(rows)}"]
        for name, r in found.items()
    ]
    print(render(["sampling", "whole row, us", f"{LARGEST} largest, us", "asked for whole"], lines))
    print(json.dumps({"vocabulary": options.vocabulary, "rows": len(rows), "sampling": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
