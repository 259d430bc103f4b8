"""Engines of TensorRT for RTX, built without a GPU: seconds, memory, and whether a repeated build gives the same bytes.

    python benchmarks/build_engines.py                   # the demo checkpoint; a layer of each kind, official size
    python benchmarks/build_engines.py --cases demo --target 89
    python benchmarks/build_engines.py --plain-parts     # what lies between the plugins, as TensorRT has to build it

Layers of official sizes come from sparse checkpoints (holes instead of weights), whose weights are inputs of the plans.
Every plan is built twice. A plan's own text lists the ONNX nodes of its kernels: a custom node of which it lists none
would be lost. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from flashnext.builder.build import build_engine
from flashnext.builder.engine_manifest import EngineManifest, Range, read_plan
from flashnext.builder.job import PlanJob
from flashnext.builder.plain_parts import cut
from flashnext.builder.plan_process import build_in_process
from flashnext.builder.plan_text import listed_nodes
from flashnext.builder.plugin_graph import plugin_form
from flashnext.builder.portable_graph import portable_form
from flashnext.builder.profiles import ProfileOptions, step_sizes
from flashnext.builder.proposal import EngineOptions, Proposal, propose
from flashnext.export.checkpoint.sparse_checkpoint import write_sparse_checkpoint
from flashnext.export.errors import message_at_exit
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.parser import whole_number
from flashnext.runtime.cli.table import render

ROOT = Path(__file__).parents[1]
ONE_LAYER = {"ple_layer_ids": [], "mtp_num_hidden_layers": 0}
CASES: dict[str, dict[str, Any] | None] = {
    "demo": None,
    "gdn": {**ONE_LAYER, "full_attention_interval": 4},
    "qsa": {**ONE_LAYER, "full_attention_interval": 1},
}
"""Fields of the official configuration that give one layer of a kind; None: the checkpoint in models/small."""
SIZES = {"window": 8, "slots": 2}


def export(case: str, folder: Path, dtype: str) -> Path:
    """The case's bundle."""
    fields, bundle = CASES[case], folder / f"{case}-{dtype}"
    checkpoint = ROOT / "models/small"
    if fields is not None:
        checkpoint = folder / f"{case}.checkpoint"
        if not checkpoint.exists():
            write_sparse_checkpoint(checkpoint, layers=1, shards=2, fields=fields)
    export_bundle(checkpoint, bundle, ExportOptions(capacity=1024 if fields is None else 4096, dtype=dtype, **SIZES))
    return bundle


def proposal_for(bundle: Path, target: int, out: Path, weights_as_inputs: bool) -> Proposal:
    """A build of the bundle for a target, into `out`."""
    manifest = Manifest.read(bundle)
    options = EngineOptions("tensorrt-rtx", (target,), out, weights_as_inputs=weights_as_inputs)
    return propose(bundle, manifest, Path(manifest.checkpoint.common_parent), options)


def measure(case: str, folder: Path, target: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Build a case's engine twice; the figures of each plan."""
    bundle = export(case, folder, dtype)
    engines = [folder / f"{case}-{name}" for name in ("first", "second")]
    first, second = (proposal_for(bundle, target, engine, CASES[case] is not None) for engine in engines)
    built, again = build_engine(first), build_engine(second)
    for name, graph in built.graphs.items():
        for plan, repeated, proposed in zip(graph.plans, again.graphs[name].plans, first.graphs[name], strict=True):
            (step,) = proposed.profiles
            yield {
                "case": case,
                "plan": plan.file,
                "seconds": plan.seconds,
                "processor_seconds": plan.processor_seconds,
                "peak_bytes": plan.peak_bytes,
                "estimated_bytes": proposed.estimate.host,
                "plan_bytes": plan.bytes,
                "same_bytes": plan.sha256 == repeated.sha256,
                **accounted(built, engines[0], bundle, name, step),
            }


def accounted(built: EngineManifest, engine: Path, bundle: Path, name: str, step: str) -> dict[str, Any]:
    """Custom nodes of a graph, those that the plan's text lists none of, and the nodes that it lists."""
    manifest, graph = Manifest.read(bundle), built.graphs[name]
    form = portable_form((bundle / manifest.graphs[name].file).read_bytes(), manifest.window, step)
    plan = next(p for p in graph.plans if p.file == next(q.plan for q in graph.profiles if q.name == step))
    listed = listed_nodes(read_plan(engine, plan))
    lost = sorted(set(form.custom_nodes) - set(listed))
    return {"custom_nodes": len(form.custom_nodes), "lost": lost, "listed_nodes": listed.total()}


def measure_parts(case: str, folder: Path, target: int, dtype: str) -> Iterator[dict[str, Any]]:
    """Build what lies between the plugins of each of a case's graphs."""
    bundle = export(case, folder, dtype)
    manifest = Manifest.read(bundle)
    for name, spec in manifest.graphs.items():
        parts = cut(plugin_form((bundle / spec.file).read_bytes()).model)
        (folder / "graph.onnx").write_bytes(parts)
        ranges = tuple(dynamic(parts, sizes) for sizes in step_sizes(manifest, ProfileOptions()).values())
        weights = manifest.checkpoint.common_parent
        job = PlanJob("tensorrt-rtx", "graph.onnx", "parts.plan", weights, ranges, (target,))
        built = build_in_process(job, folder)
        yield {
            "case": case,
            "plan": f"{name} (plain parts)",
            "seconds": round(built.seconds, 3),
            "processor_seconds": round(built.processor_seconds, 3),
            "peak_bytes": built.peak_bytes,
            "plan_bytes": (folder / "parts.plan").stat().st_size,
            "plain_nodes": len(onnx.load_model_from_string(parts).graph.node),
        }


def dynamic(graph: bytes, sizes: Any) -> dict[str, Range]:
    """Ranges of a graph's dynamic inputs."""
    found = {}
    for value in onnx.load_model_from_string(graph).graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if any(isinstance(d, str) for d in dims):
            found[value.name] = Range(*(tuple(sizes[d][i] if d in sizes else d for d in dims) for i in range(3)))
    return found


def row(figures: dict[str, Any]) -> list[str]:
    """A line of the table."""
    return [
        f"{figures['case']} {figures['plan']}",
        f"{figures['seconds']:.1f}",
        f"{figures['processor_seconds']:.1f}",
        f"{figures['peak_bytes'] / 1e6:.0f}",
        f"{figures['estimated_bytes'] / 1e6:.0f}" if "estimated_bytes" in figures else "",
        f"{figures['plan_bytes'] / 1e6:.1f}",
        {True: "yes", False: "NO", None: ""}[figures.get("same_bytes")],
        f"{figures['custom_nodes'] - len(figures['lost'])} of {figures['custom_nodes']}" if "lost" in figures else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build engines of TensorRT for RTX, twice, and measure.")
    parser.add_argument("--cases", choices=sorted(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--target", type=whole_number(1), default=120, help="compute capability (default: 120)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--plain-parts", action="store_true", help="build what lies between the plugins instead")
    options = parser.parse_args()
    function = measure_parts if options.plain_parts else measure
    with message_at_exit(), tempfile.TemporaryDirectory() as folder:
        figures = [f for case in options.cases for f in function(case, Path(folder), options.target, options.dtype)]
    header = ["plan", "seconds", "processor s", "peak MB", "estimated MB", "plan MB", "same bytes", "custom nodes"]
    print(render(header, [row(f) for f in figures]))
    print(
        json.dumps({"benchmark": "build_engines", "target": options.target, "dtype": options.dtype, "plans": figures})
    )


if __name__ == "__main__":
    main()
