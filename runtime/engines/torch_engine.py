"""The `torch` engine: runs the PyTorch graph modules that the ONNX graphs were traced from.

States are updated in place in the arrays that were bound. This is the reference that other engines are validated
against, and the only module of the runtime that imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.model.loading import load_graph, to_torch
from flashnext.runtime.engines.base import Array, numpy_dtype


class TorchEngine:
    """One graph of a bundle as a PyTorch module."""

    def __init__(self, graph: str, manifest: Manifest, checkpoint: Checkpoint, threads: int | None) -> None:
        options = BuildOptions(manifest.window, manifest.capacity, manifest.slots, manifest.dtype)
        if threads:
            torch.set_num_threads(threads)
        self.spec: GraphSpec = manifest.graphs[graph]
        self.module = load_graph(checkpoint, manifest.config, options, graph)
        self._bound: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, Array] = {}

    def bind(self, tensors: Mapping[str, Array]) -> None:
        """See `Engine.bind`."""
        wanted = {t.name for t in self.spec.inputs}
        for name, array in tensors.items():
            if name in wanted:
                self._arrays[name] = array
                self._bound[name] = to_torch(array)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """See `Engine.run`."""
        inputs = self._bound | {name: to_torch(array) for name, array in feeds.items()}
        with torch.inference_mode():
            outputs = self.module(inputs)
        return {t.name: _to_numpy(outputs[t.name], t.dtype) for t in self.spec.outputs if t.role != "state"}


def _to_numpy(tensor: torch.Tensor, dtype: str) -> Array:
    if dtype == "bfloat16":
        bits: Any = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(numpy_dtype(dtype))  # type: ignore[no-any-return]
    return tensor.contiguous().numpy()  # type: ignore[no-any-return]
