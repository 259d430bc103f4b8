"""Engines by name: `open_engine` loads one graph of a bundle in the engine that the user chose."""

from __future__ import annotations

from pathlib import Path

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.base import Engine

ENGINES = ("onnxruntime", "torch")


def open_engine(
    kind: str, graph: str, bundle: Path, manifest: Manifest, checkpoint: Checkpoint, threads: int | None = None
) -> Engine:
    """Open one graph of a bundle.

    Raises:
        EngineError: unknown engine, or its package is not installed.
    """
    if kind not in ENGINES:
        raise EngineError(f"There is no engine {kind!r}; choose one of {', '.join(ENGINES)}.")
    try:
        if kind == "torch":
            from flashnext.runtime.engines.torch_engine import TorchEngine

            return TorchEngine(graph, manifest, checkpoint, threads)
        from flashnext.runtime.engines.onnxruntime_engine import OnnxRuntimeEngine
    except ImportError as cause:
        extra = "export" if kind == "torch" else "cpu"
        raise EngineError(
            f"The {kind} engine needs a package that is not installed ({cause}). "
            f"Install it with: pip install 'flashnext-trt[{extra}]'"
        ) from None
    return OnnxRuntimeEngine(graph, bundle, manifest, checkpoint, threads)
