"""ONNX Runtime's execution providers on the GPU at hand: models/small against PyTorch, layer by layer, and its text.

    python benchmarks/gpu_providers.py [--provider NAME …] [--output FILE]

Exports the trained small model once (float32, TF32 off), then for each provider that is installed: `flashnext validate
--per-layer`, and greedy text with and without drafts against the CPU's. Providers that are not here are left out with
the reason; whatever one of them fails with is kept, and the next one is tried. Ends with one JSON line, and with 1 if a
provider that is here fails or differs. Not run on a GPU yet: none was at hand; with `--provider CPUExecutionProvider`
it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashnext.export.errors import FlashNextError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.cli.parser import output_file
from flashnext.runtime.engines.onnxruntime_providers import CPU, CUDA, TENSORRT, TENSORRT_RTX, Provider, Providers
from flashnext.runtime.validation.validator import validate

SMALL = Path(__file__).parents[1] / "models/small"
OPTIONS: dict[str, dict[str, str]] = {CUDA: {"use_tf32": "0"}}
"""TF32 rounds to 10 bits, more than the tolerance of float32."""
TF32_OFF = {"NVIDIA_TF32_OVERRIDE": "0"}
PROMPTS = ["Once upon a time", "It is a truth universally acknowledged, that"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAFTED = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, draft_tokens=4)


def texts(bundle: Path, providers: Sequence[Provider]) -> tuple[list[list[int]], float]:
    """Tokens of all prompts, without and with drafts; seconds of the second run."""
    with LLM(bundle, providers=providers) as llm:
        for _ in range(2):
            start = time.perf_counter()
            found = [o.token_ids for params in (GREEDY, DRAFTED) for o in llm.generate(PROMPTS, params)]
            seconds = time.perf_counter() - start
    return found, seconds


def tried(bundle: Path, name: str, wanted: list[list[int]]) -> dict[str, Any]:
    """What came of one provider."""
    providers: list[Provider] = [(name, OPTIONS.get(name, {})), *([] if name == CPU else [CPU])]
    try:
        Providers.of(providers)
    except FlashNextError as missing:
        return {"left_out": str(missing)}
    report = validate(bundle, "onnxruntime", per_layer=True, providers=providers)
    for fault in report.faults:
        print(f"{name}: {fault}", flush=True)
    found, seconds = texts(bundle, providers)
    return {
        "outputs": len(report.rows),
        "differing_outputs": sum(not row for row in report.rows),
        "largest_error": max(row.relative for row in report.rows),
        "differing_texts": sum(a != b for a, b in zip(found, wanted, strict=True)),
        "tokens_per_second": round(sum(map(len, found)) / seconds, 1),
    }


def run(names: Sequence[str], checkpoint: Path) -> dict[str, Any]:
    """Every provider; the facts by name."""
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu_providers-") as folder:
        bundle = Path(folder) / "bundle"
        export_bundle(checkpoint, bundle, ExportOptions(capacity=256, slots=2))
        wanted, _ = texts(bundle, [CPU])
        for name in names:
            try:
                facts[name] = tried(bundle, name, wanted)
            except (FlashNextError, RuntimeError) as error:  # RuntimeError: ONNX Runtime's own
                facts[name] = {"failed": str(error)}
            print(f"{name}: {facts[name]}", flush=True)
    return facts


def passed(facts: dict[str, Any]) -> bool:
    """Nothing that is here fails or differs."""
    bad = ("failed", "differing_outputs", "differing_texts")
    return not any(found.get(key) for found in facts.values() for key in bad)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check ONNX Runtime's execution providers on models/small.")
    known = (CUDA, TENSORRT, TENSORRT_RTX, CPU)
    parser.add_argument("--provider", action="append", choices=known, help="only this one (may be repeated)")
    parser.add_argument("--checkpoint", type=Path, default=SMALL, help="another checkpoint (default: models/small)")
    parser.add_argument("--output", type=output_file, help="write the facts to this file, too")
    options = parser.parse_args(arguments)
    os.environ |= TF32_OFF
    facts = run(options.provider or known[:3], options.checkpoint)
    if options.output:
        options.output.write_text(json.dumps(facts), encoding="utf-8")
    print(json.dumps(facts))
    return 0 if passed(facts) else 1


if __name__ == "__main__":
    sys.exit(main())
