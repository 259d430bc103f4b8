"""N-gram rows on the host: hashing and gathering against the fastest gathers of PyTorch and numpy, which do not hash.

    python benchmarks/ngram_rows.py                  # a table of 2 GB in memory; prints a table, then one JSON line
    python benchmarks/ngram_rows.py --gigabytes 8 --rounds 30

Every figure is a ratio within one run: the competitors take turns, round by round, on the same table and on random
tokens of their own for each round. A prompt is 4,096 tokens (65,536 rows of 160 columns), a decode step one token (16
rows). The competitors get ids that are computed already and a buffer that is allocated already; ours starts from token
ids. A pause before each prompt lets PyTorch's threads go to sleep, which spin on for milliseconds after their work.
Then the formats alone, each with a stretch of rounds at a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import ml_dtypes
import numpy as np

from flashnext.export.checkpoint.ngram_constants import multipliers
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.cli.parser import number_from, whole_number
from flashnext.runtime.cli.table import render
from flashnext.runtime.ngram import HostRows, ids
from flashnext.runtime.ngram_table import NgramTable

COLUMNS, HEADS, SHARDS = 160, 16, 16
EOS, VOCABULARY, PROMPT = 248_044, 248_320, 4096
COMPETITORS = 7
STRETCH = 12
"""Rounds that a format has to itself: a model has one table, and with it one format."""
BF16, FP8, RIVAL = "hash + gather, BF16", "hash + gather, FP8", "torch.index_select"
Steps = dict[str, Callable[[int], object]]


def spec_of(rows: int, form: str) -> NgramSpec:
    """The official layer's hashing over a table of this many rows."""
    sizes = tuple(rows // HEADS - 2 * h - 1 for h in range(HEADS))
    return NgramSpec(
        layer=1,
        input="ngram_rows.1",
        multipliers=multipliers(VOCABULARY, 3, 0, 0),
        head_sizes=sizes,
        head_offsets=(0, *accumulate(sizes[:-1])),
        heads_per_ngram=HEADS // 2,
        eos=EOS,
        columns=COLUMNS,
        rows=rows,
        shards=tuple(f"shard_{i}" for i in range(SHARDS)),
        form=form,
        scale="scale" if form == "fp8" else "",
    )


def random_codes(rows: int, row_bytes: int) -> Any:
    """Bytes [rows, row_bytes], touched; random in blocks, since only the places read need to be."""
    block = np.random.default_rng(0).integers(0, 120, (4096, row_bytes), np.uint8)
    table = np.empty((rows, row_bytes), np.uint8)
    for start in range(0, rows, len(block)):
        table[start : start + len(block)] = block[: rows - start]
    return table


def rows_of(codes: Any, form: str) -> HostRows:
    spec = spec_of(len(codes), form)
    stored = codes.view(ml_dtypes.bfloat16 if form == "plain" else ml_dtypes.float8_e4m3fn)
    return HostRows(spec, NgramTable(spec, np.array_split(stored, SHARDS), "bfloat16", scale=0.37), "bfloat16")


def texts(width: int, count: int) -> list[tuple[Any, Any, Any]]:
    """Random steps of one sequence: tokens, context, lengths."""
    rng = np.random.default_rng(1)
    return [
        (
            rng.integers(0, VOCABULARY, (1, width)).astype(np.int32),
            rng.integers(0, VOCABULARY, (1, 2)),
            np.array([width], np.int32),
        )
        for _ in range(count)
    ]


def formats(plain: HostRows, fp8: HostRows, steps: list[tuple[Any, Any, Any]]) -> Steps:
    """Ours alone."""
    return {BF16: lambda i: plain.rows(*steps[i]), FP8: lambda i: fp8.rows(*steps[i])}


def competitors(plain: HostRows, fp8: HostRows, table: Any, steps: list[tuple[Any, Any, Any]]) -> Steps:
    """What each does with step number i."""
    import torch  # here, since other benchmarks take the tables from this module and no more

    width = steps[0][0].size
    ready = [ids(plain.spec, tokens, context).reshape(-1) for tokens, context, _ in steps]
    tensors = [torch.from_numpy(chosen) for chosen in ready]
    as_torch = torch.from_numpy(table.view(np.int16))
    buffer = np.empty((width * HEADS, COLUMNS), np.int16)
    into = torch.from_numpy(buffer)
    numbers = table.view(np.int16)
    slow = HostRows(plain.spec, plain.table, "bfloat16", native=False)
    return formats(plain, fp8, steps) | {
        "by way of a ticket, BF16": lambda i: plain.submit(*steps[i]).wait(),
        "by way of a ticket, FP8": lambda i: fp8.submit(*steps[i]).wait(),
        "hash + gather, numpy alone": lambda i: slow.rows(*steps[i]),
        RIVAL: lambda i: torch.index_select(as_torch, 0, tensors[i], out=into),
        "numpy.take": lambda i: np.take(numbers, ready[i], axis=0, out=buffer, mode="clip"),
    }


def measure(steps: Steps, rounds: int, pause: float = 0.0, stretch: int = 1) -> dict[str, list[float]]:
    """Microseconds of each round; all take their turn, each with `stretch` rounds, after a pause of so many seconds.

    No tokens are run twice: rows that one has read would be in the caches of the next. In a stretch of its own, a table
    finds its page tables in the caches, as where it is the only one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for first in range(0, rounds, stretch):
        for turn, (name, run) in enumerate(steps.items()):
            for i in range(first, min(first + stretch, rounds)):
                time.sleep(pause)
                start = time.perf_counter_ns()
                run(i * len(steps) + turn)
                times[name].append((time.perf_counter_ns() - start) / 1000)
    return times


def summary(times: dict[str, list[float]], warm_up: int, rival: str) -> dict[str, dict[str, float]]:
    """Median and 99th percentile in microseconds, and the median ratio to the rival of the same round."""
    kept = {name: np.array(values[warm_up:]) for name, values in times.items()}
    return {
        name: {
            "p50_us": float(np.median(values)),
            "p99_us": float(np.quantile(values, 0.99)),
            "ratio": float(np.median(values / kept[rival])),
        }
        for name, values in kept.items()
    }


def show(title: str, times: dict[str, list[float]], warm_up: int, rival: str) -> dict[str, dict[str, float]]:
    """Print the summary as a table, and return it."""
    found = summary(times, warm_up, rival)
    lines = [[k, f"{v['p50_us']:,.1f}", f"{v['p99_us']:,.1f}", f"{v['ratio']:.2f}"] for k, v in found.items()]
    print(render([title, "p50 us", "p99 us", f"to {rival}"], lines), end="\n\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gigabytes", type=number_from(0.001, 1e4), default=2.0, help="of the BF16 table (default: 2)")
    add("--rounds", type=whole_number(1), default=20, help="prompts (default: 20); 100 times as many steps")
    add("--pause", type=number_from(0, 1e4), default=20.0, metavar="MS", help="before each prompt (default: 20)")
    arguments = parser.parse_args()
    rows = int(arguments.gigabytes * 1e9) // (2 * COLUMNS)
    codes = random_codes(rows, 2 * COLUMNS)
    plain, fp8 = rows_of(codes, "plain"), rows_of(random_codes(rows, COLUMNS), "fp8")
    report: dict[str, Any] = vars(arguments).copy()
    many, pause = 100 * arguments.rounds, arguments.pause / 1000
    for name, width, rounds, wait in (("prompt", PROMPT, arguments.rounds, pause), ("decode", 1, many, 0.0)):
        warm_up = rounds // 5
        runs = competitors(plain, fp8, codes, texts(width, COMPETITORS * (rounds + warm_up)))
        report[name] = show(f"{name}, {width * HEADS:,} rows", measure(runs, rounds + warm_up, wait), warm_up, RIVAL)
        stretches = max(arguments.rounds, rounds // STRETCH) * STRETCH
        runs = formats(plain, fp8, texts(width, 2 * (stretches + STRETCH)))
        times = measure(runs, stretches + STRETCH, stretch=STRETCH)
        report[f"{name}_formats"] = show(f"{name}, a format at a time", times, STRETCH, BF16)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
