"""Engines by name: `open_engine` loads one graph of a bundle in the engine that the user chose.

`onnxruntime` runs the portable graphs; `tensorrt` and `tensorrt-rtx` the plans that `flashnext build` made, on a GPU;
`torch` the PyTorch model, whose custom ops are computed by

- `torch:reference`: their definition in PyTorch, on the CPU;
- `torch:device`: the CUDA kernels, on the GPU;
- `torch:host`: the kernels' own source, executed on the CPU to check it: slow.

`torch` alone is `torch:device` where PyTorch sees a GPU, and `torch:reference` elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.base import Engine
from flashnext.runtime.mapped_files.files import MappedFiles

if TYPE_CHECKING:
    from flashnext.runtime.engines.onnxruntime_providers import Provider

ENGINES = ("onnxruntime", "torch", "torch:reference", "torch:device", "torch:host", "tensorrt", "tensorrt-rtx")


def open_engine(
    kind: str,
    graph: str,
    bundle: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    threads: int | None = None,
    *,
    watch: bool = False,
    providers: Sequence[Provider] | None = None,
) -> Engine:
    """Open one graph of a bundle; with `watch`, its outputs include what happens at its sites (`sites.py`).

    `providers` are those of ONNX Runtime, which the other engines have no use for.

    Raises:
        EngineError: unknown engine, or its package is not installed.
        CheckpointError: a file is cut short meanwhile.
    """
    if kind not in ENGINES:
        raise EngineError(f"There is no engine {kind!r}; choose one of {', '.join(ENGINES)}.")
    if kind.startswith("tensorrt"):
        if watch:
            raise EngineError(
                f"A plan of {kind} does not show what happens inside its graph. Compare it without --per-layer; or let "
                "Polygraphy build one that does: flashnext golden BUNDLE --out FOLDER --per-layer writes the commands."
            )
        from flashnext.runtime.engines.tensorrt.opening import open_graph

        return open_graph(kind, graph, bundle, manifest)
    try:
        if kind.startswith("torch"):
            from flashnext.runtime.engines.torch_engine import TorchEngine

            with MappedFiles.of(checkpoint):
                return TorchEngine(graph, manifest, checkpoint, threads, kind.partition(":")[2], watch)
        from flashnext.runtime.engines.onnxruntime_engine import OnnxRuntimeEngine
    except ImportError as cause:
        extra = "cpu" if kind == "onnxruntime" else "export"
        raise EngineError(
            f"The {kind} engine needs a package that is not installed ({cause}). "
            f"Install it with: pip install 'flashnext-trt[{extra}]'"
        ) from None
    with MappedFiles.of(checkpoint):
        return OnnxRuntimeEngine(graph, bundle, manifest, checkpoint, threads, watch=watch, providers=providers)
