"""A TensorRT engine of models/small on the GPU at hand: built, checked, and its text compared with PyTorch's.

    python benchmarks/gpu_engines.py [--engine tensorrt-rtx] [--output FILE]

Exports the trained small model, builds the plugin library and the engine (`flashnext build` runs the golden check, so a
wrong engine ends here), then writes greedy text with and without drafts in the engine and in `torch:device`, and times
the engine: `tensorrt` twice, with n-gram rows that the host gathers and with rows that the GPU gathers from a pinned
table. The largest logits and the sums that the GPU hands over are compared with whole rows. Ends with one JSON line,
and with 1 if a text or a row differs. Where TensorRT is not installed it says so and ends with 0. Not run yet: no GPU
was at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.errors import EngineError, message_at_exit
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.bench import Load, measure
from flashnext.runtime.cli.main import main as flashnext
from flashnext.runtime.cli.parser import output_file
from flashnext.runtime.engines.engine_set import EngineOptions
from flashnext.runtime.engines.tensorrt.plan import MODULES, Library
from flashnext.runtime.logits import SUM_ERROR, LogitRow
from flashnext.runtime.model_runner import ModelRunner, StepBatch

SMALL = Path(__file__).parents[1] / "models/small"
PROMPTS = ["Once upon a time", "The morning was", "It is a truth universally acknowledged, that " * 8]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
DRAFTED = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, draft_tokens=4)
TEMPERATURES = (1.0, 0.6)
"""For sums: the one that every step has, and one that takes a launch of its own."""
LOADS = [Load(prompt_length=128, batch=batch, output_tokens=32) for batch in (1, 3)]
TABLES = {"host": "mapped", "device": "pinned"}
"""Where the n-gram table is kept, by who gathers its rows."""


class StageError(Exception):
    """A command that did not end with 0."""


def command(*words: str) -> None:
    """Run a command of `flashnext` in this process."""
    print("$ flashnext", *words, flush=True)
    if code := flashnext(words):
        raise StageError(f"flashnext {words[0]} ended with {code}")


def texts(bundle: Path, engine: str, **options: str) -> tuple[list[list[int]], float]:
    """Tokens of all prompts, without and with drafts; seconds of the second run of both."""
    with LLM(bundle, engine=engine, **options) as llm:  # type: ignore[arg-type]
        for _ in range(2):  # the first one captures CUDA graphs
            start = time.perf_counter()
            found = [o.token_ids for params in (GREEDY, DRAFTED) for o in llm.generate(PROMPTS, params)]
            seconds = time.perf_counter() - start
    return found, seconds


def latencies(bundle: Path, engine: str, table: str, gather: str) -> list[dict[str, Any]]:
    """Each load's first token, time per token and n-gram rows, as `flashnext bench` has them."""
    options = EngineOptions(ngram_gather=gather)
    runner = ModelRunner.open(bundle, engine, options=options, ngram_table=table)
    try:
        return [measure(runner, load).facts() for load in LOADS]
    finally:
        runner.close()


def wrong_rows(bundle: Path, engine: str) -> int:
    """Rows whose largest logits or sums, as the device picks them, are not the whole row's; the last steps replay a
    captured graph. 0 where whole rows come to the host anyway."""
    wrong = 0
    runner = ModelRunner.open(bundle, engine)
    try:
        slots, one = np.arange(runner.manifest.slots, dtype=np.int32), np.ones(runner.manifest.slots, np.int32)
        context = np.zeros((len(slots), runner.manifest.config.ngram_size - 1), np.int64)
        for token in range(4):
            ids = token * len(slots) + slots[:, None]
            logits = runner.step(StepBatch(ids, slots, 0 * one, 0 * one, one, context, slots)).logits
            if not isinstance(logits, np.ndarray):
                wrong += sum(not is_right(logits[row]) for row in range(len(logits)))
    finally:
        runner.close()
    return wrong


def is_right(row: LogitRow) -> bool:
    """Whether a row's largest logits and its sums are those of the whole row."""
    whole = row.whole()
    best = np.argsort(-whole, kind="stable")[: len(row.tokens)]
    exponents = whole.astype(np.float64) - whole.max()
    errors = [abs(row.sum(t) / np.exp(exponents / t).sum() - 1) for t in TEMPERATURES]
    same = np.array_equal(row.tokens, best) and np.array_equal(row.logits, whole[best])
    return same and max(errors) <= SUM_ERROR


def measured(bundle: Path, engine: str, wanted: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The engine's texts and times, by who gathers the n-gram rows; what differs from the texts that are wanted."""
    found: dict[str, Any] = {}
    for gather, table in TABLES.items():
        if gather == "device" and engine != "tensorrt":
            continue
        texts_found, seconds = texts(bundle, engine, ngram_table=table, ngram_gather=gather)
        found[gather] = {
            "differing_texts": sum(a != b for a, b in zip(texts_found, wanted, strict=True)),
            "tokens_per_second": round(sum(map(len, texts_found)) / seconds, 1),
            "loads": latencies(bundle, engine, table, gather),
        }
    return found


def run(engine: str) -> dict[str, Any]:
    """Everything; the facts."""
    with tempfile.TemporaryDirectory(prefix="gpu_engines-") as folder:
        bundle = Path(folder) / "bundle"
        command("export", str(SMALL), str(bundle), "--capacity", "1024", "--slots", "3")
        if engine == "tensorrt":
            command("plugins", "build")
        start = time.perf_counter()
        command("build", str(bundle), "--engine", engine)
        built = time.perf_counter() - start
        wanted, torch_seconds = texts(bundle, "torch:device")
        found = measured(bundle, engine, wanted)
        wrong = wrong_rows(bundle, engine)
    return {
        "engine": engine,
        "build_seconds": round(built, 1),
        "texts": len(wanted),
        "differing_texts": sum(way["differing_texts"] for way in found.values()),
        "wrong_rows_of_logits": wrong,
        "torch_tokens_per_second": round(sum(map(len, wanted)) / torch_seconds, 1),
        "rows_gathered_by": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build and check a TensorRT engine of models/small on this GPU.")
    parser.add_argument(
        "--engine", choices=MODULES, default="tensorrt", help="what builds and runs (default: tensorrt)"
    )
    parser.add_argument("--output", type=output_file, help="write the facts to this file, too")
    options = parser.parse_args(arguments)
    try:
        Library.open(options.engine)
    except EngineError as missing:
        facts: dict[str, Any] = {"engine": options.engine, "left_out": str(missing)}
    else:
        with message_at_exit():
            facts = run(options.engine)
    if options.output:
        options.output.write_text(json.dumps(facts), encoding="utf-8")
    print(json.dumps(facts))
    return 1 if facts.get("differing_texts") or facts.get("wrong_rows_of_logits") else 0


if __name__ == "__main__":
    sys.exit(main())
