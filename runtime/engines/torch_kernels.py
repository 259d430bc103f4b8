"""Runs the custom ops of the PyTorch model on the kernels, in place of the reference.

`KernelOps.run` binds an op's tensors to the fields of the kernels' parameter struct, which carry the ports' names,
makes its outputs, and launches; states are written in place. One of these serves all ops of an engine:

    with implemented_by(KernelOps.on_host().run):      # the kernels' own source, executed on the CPU: slow
        outputs = module(inputs)

On a GPU (`KernelOps.on_device`) launches go to PyTorch's current stream. Workspace is one buffer that grows to the
largest that was asked for: launches on one stream use it one after the other. Counters that a kernel wants zero at its
start, and leaves zero, are likewise made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashnext.export.errors import EngineError
from flashnext.export.ops import schema
from flashnext.export.ops.torch_ops import empty_outputs
from flashnext.plugins.device_library import DeviceKernels
from flashnext.plugins.host_library import HostKernels
from flashnext.plugins.kernel_library import KernelLibrary
from flashnext.plugins.params import ALIGNMENT, Params, bound_sizes, field_of_port, shape_of

COUNTERS = "tickets"
"""The field of counters, in the ops that have some."""
FP8_CODES = "C"
"""Type variable of E4M3 codes: graphs carry them as bytes, kernels tell them from other bytes by their dtype."""

Launch = Callable[[str, Mapping[str, Any]], object]


class Workspace:
    """Memory on a device that the launches of one stream use in turn."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def __call__(self, size: int) -> Tensor:
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:size]


class KernelOps:
    """The ops on one kernel library."""

    def __init__(self, library: KernelLibrary, launch: Launch) -> None:
        self._library = library
        self._launch = launch
        self._counters: dict[tuple[str, torch.device], Tensor] = {}

    @classmethod
    def on_host(cls) -> KernelOps:
        """On CPU tensors, by the host execution.

        Raises:
            PluginError: there is no g++.
        """
        kernels = HostKernels.load()
        return cls(kernels, kernels.launch)

    @classmethod
    def on_device(cls) -> KernelOps:
        """On CUDA tensors.

        Raises:
            EngineError: PyTorch sees no GPU.
            PluginError: the kernels cannot be built.
        """
        if not torch.cuda.is_available():
            raise EngineError("PyTorch sees no GPU here. Install a build of it with CUDA, or use torch:reference.")
        kernels = DeviceKernels.load(Workspace(torch.device("cuda")))
        return cls(kernels, lambda op, values: kernels.launch(op, values, torch.cuda.current_stream().cuda_stream))

    def run(self, op: str, form: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Any:
        """See `flashnext.export.ops.torch_ops.Implementation`.

        Raises:
            PluginError: there is no kernel for these sizes or formats.
            KernelError: a launch failed.
        """
        table = schema.op(op)
        ports = table.form(form)
        given = list(zip(ports.inputs, inputs, strict=True))
        made = [port for port in ports.outputs if port.name not in ports.aliases]
        results = empty_outputs(table, ports, inputs, attributes, made)
        outputs = {port.name: tensor for port, tensor in zip(made, results, strict=True)}
        params = self._library.params(schema.snake_name(op))
        values = _fields(params, op, ports, given, set(ports.aliases.values()))
        values |= _fields(params, op, ports, list(zip(made, results, strict=True)), set(outputs))
        self._start(params, values | _attributes(attributes), inputs[0].device)
        states = {port.name: tensor for port, tensor in given}
        outputs |= {out: states[state] for out, state in ports.aliases.items()}
        found = tuple(outputs[port.name] for port in ports.outputs)
        return found[0] if len(found) == 1 else found

    def _start(self, params: Params, values: dict[str, Any], device: torch.device) -> None:
        counters = [f for f in params.fields if f.name == COUNTERS]
        if counters:
            values[COUNTERS] = self._zeros(params.op, shape_of(counters[0], bound_sizes(params, values)), device)
        try:
            self._launch(params.op, values)
        except Exception:
            self._counters.clear()  # a launch that failed half-way may have left some that are not zero
            raise

    def _zeros(self, op: str, shape: Sequence[int], device: torch.device) -> Tensor:
        size = torch.Size(shape).numel()
        if (op, device) not in self._counters or self._counters[op, device].numel() < size:
            self._counters[op, device] = torch.zeros(size, dtype=torch.int32, device=device)
        return self._counters[op, device][:size].view(shape)


def _attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """By the fields' names; activations are numbers in the struct."""
    values = dict(attributes)
    if "gate" in values:
        values["silu_gate"] = int(values.pop("gate") == "silu")
    return values


def _fields(
    params: Params,
    op: str,
    form: schema.Form,
    given: Sequence[tuple[schema.Port, Tensor]],
    written: set[str],
) -> dict[str, Tensor]:
    """Ports' tensors by field, in the fields' shapes. What is `written` keeps its memory; the rest may be copied."""
    shapes = {field.name: field.shape for field in params.fields}
    values = {}
    for port, tensor in given:
        name = field_of_port(op, form.name, port.name)
        if port.dtype == FP8_CODES and tensor.dtype == torch.uint8:
            tensor = tensor.view(torch.float8_e4m3fn)
        if port.name not in written:
            tensor = aligned(tensor)
        if shapes.get(name, ("",))[0] == "tokens" and port.shape[:2] == ("B", "S"):
            tensor = tensor.flatten(0, 1)
        values[name] = tensor
    return values


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where its memory is not as kernels want it."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
