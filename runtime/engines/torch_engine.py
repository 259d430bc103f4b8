"""The `torch` engine: runs the PyTorch graph modules that the ONNX graphs were traced from.

On the CPU its custom ops are the reference that other engines are validated against, and states are updated in place
in the arrays that were bound. On a GPU (or to check the kernels, on the CPU) the kernels compute them, see
`torch_kernels.py`; a GPU keeps weights and states in its own memory. Only these two modules of the runtime import
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.graphs.manifest_checks import options_of
from flashnext.export.model.loading import load_graph, to_torch
from flashnext.export.ops import schema
from flashnext.export.ops.torch_ops import Implementation, implemented_by, reference
from flashnext.runtime.engines.base import Array, numpy_dtype
from flashnext.runtime.engines.sites import WATCHED_OPS, Site, sites, watched_spec
from flashnext.runtime.engines.torch_kernels import KernelOps, aligned
from flashnext.runtime.mapped_files.files import MappedFiles

FLOAT_PARAMETERS = ("A_log", "dt_bias", "linear_attn.norm.weight")
"""Ends of the names of parameters that are computed with as float32, whatever the activations are."""


class TorchEngine:
    """One graph of a bundle as a PyTorch module; `ops` is what computes the custom ops (see `open_engine`)."""

    def __init__(
        self,
        graph: str,
        manifest: Manifest,
        checkpoint: Checkpoint,
        threads: int | None,
        ops: str = "reference",
        watch: bool = False,
    ) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.spec: GraphSpec = watched_spec(manifest, graph) if watch else manifest.graphs[graph]
        self._files = MappedFiles.of(checkpoint)
        self._device, self._implementation = _implementation(ops)
        self.states_elsewhere = self._device.type != "cpu"
        self.module = load_graph(checkpoint, manifest.config, options_of(manifest), graph)
        if self._implementation is not reference:
            _settle(self.module, self._device, getattr(torch, manifest.dtype))
        self._bound: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, Array] = {}
        self._sites = sites(manifest, graph) if watch else []

    def bind(self, tensors: Mapping[str, Array]) -> None:
        """See `Engine.bind`."""
        roles = {t.name: t.role for t in self.spec.inputs}
        for name, array in tensors.items():
            if name in roles:
                self._arrays[name] = array
                tensor = on_device(array, self._device)
                # Weights that are mapped from a file may start anywhere; a copy for good, not one in every step.
                copied = roles[name] == "weight" and self._implementation is not reference
                self._bound[name] = aligned(tensor) if copied else tensor

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """See `Engine.run`."""
        inputs = self._bound | {name: to_torch(array).to(self._device) for name, array in feeds.items()}
        watcher = Watcher(self._implementation, self._sites) if self._sites else None
        with self._files, torch.inference_mode(), implemented_by(watcher or self._implementation):
            outputs = self.module(inputs) | (watcher.found if watcher else {})
        return {t.name: to_numpy(outputs[t.name], t.dtype) for t in self.spec.outputs if t.role != "state"}


class Watcher:
    """Runs ops by an implementation, and keeps what is watched of one run of a graph (`found`, by output)."""

    def __init__(self, implementation: Implementation, expected: Sequence[Site]) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self._implementation = implementation
        self._sites = iter(expected)

    def __call__(self, op: str, form: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, Any]) -> Any:
        out = self._implementation(op, form, inputs, attributes)
        if op in WATCHED_OPS:
            site = next(self._sites)
            assert (op, form) == (site.op, site.form), f"{op} {form} at {site}"
            table = schema.op(op).form(form)
            values = dict(zip((p.name for p in table.inputs), inputs, strict=True))
            values |= zip((p.name for p in table.outputs), out, strict=True)
            self.found |= {spec.name: values[port] for port, spec in site.ports.items()}
        return out


def _implementation(ops: str) -> tuple[torch.device, Implementation]:
    """Where to compute, and what computes the custom ops."""
    if not ops:
        ops = "device" if torch.cuda.is_available() else "reference"
    if ops == "reference":
        return torch.device("cpu"), reference
    return torch.device("cuda" if ops == "device" else "cpu"), _kernels(ops).run


@cache
def _kernels(ops: str) -> KernelOps:
    """One library, workspace and set of counters for all graphs."""
    return KernelOps.on_device() if ops == "device" else KernelOps.on_host()


def _settle(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Casts parameters once to what the layers would cast them to in every step.

    A kernel may load its weights while the launch before it still runs, so none may be written by that launch.
    """
    for name, parameter in module.named_parameters():
        wanted = torch.float32 if name.endswith(FLOAT_PARAMETERS) else dtype
        parameter.data = parameter.data.to(device, wanted)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


# --- arrays on a device -------------------------------------------------------------------------------

_ON_DEVICE: WeakValueDictionary[tuple[object, ...], torch.Tensor] = WeakValueDictionary()


def on_device(array: Array, device: torch.device) -> torch.Tensor:
    """The array's memory itself on the CPU; elsewhere one copy of it, for all graphs that bind the same array."""
    tensor = to_torch(array)
    if device.type == "cpu":
        return tensor
    key = (array.ctypes.data, tensor.shape, tensor.dtype, device)
    found = _ON_DEVICE.get(key)
    if found is None:
        found = _ON_DEVICE[key] = tensor.to(device)
    return found


def to_numpy(tensor: torch.Tensor, dtype: str) -> Array:
    tensor = tensor.cpu().contiguous()
    if dtype in ("bfloat16", "float8_e4m3fn"):
        bits: Any = tensor.view(torch.int16 if dtype == "bfloat16" else torch.uint8).numpy()
        return bits.view(numpy_dtype(dtype))  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]
