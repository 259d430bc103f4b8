"""From a graph module to an ONNX graph without weights: torch.export and torch.onnx under fake tensors.

Each custom op becomes one node of domain `flashnext` with its form as an attribute; `functions.attach` makes the form
its overload too, and adds the portable function. Parameters become initializers without data, which
`external.point_to_checkpoint` points into the checkpoint's files.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flashnext.export.graphs import plain_nodes
from flashnext.export.graphs.manifest import GraphSpec, TensorSpec
from flashnext.export.model.graphs import Graph
from flashnext.export.ops import onnx_schemas, schema, torch_ops
from flashnext.export.ops.portable.builder import OPSET

_EXAMPLE_SIZES = {"B": 2, "S": 3, "N": 5}
"""Sizes of the example step: distinct, and none of them 0 or 1, which torch.export would bake in."""


class _Positional(nn.Module):
    """A graph module that takes and returns tensors in the specification's order, as tracing wants them."""

    def __init__(self, graph: Graph, spec: GraphSpec) -> None:
        super().__init__()
        self.module = graph
        self.names = [t.name for t in spec.inputs]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.module(dict(zip(self.names, tensors, strict=True))).values())


def trace(graph: Graph, spec: GraphSpec, parameter_dtypes: dict[str, torch.dtype]) -> ir.Model:
    """Trace a graph module (built on the meta device) with the inputs and outputs of `spec`.

    `parameter_dtypes` are the dtypes that the checkpoint stores; the graph casts where it computes in another.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fake_parameters(graph, parameter_dtypes)
        args = tuple(_example(t) for t in spec.inputs)
        dims = {name: torch.export.Dim(name) for name in _EXAMPLE_SIZES}
        shapes = (tuple({i: dims[d] for i, d in enumerate(t.shape) if isinstance(d, str)} for t in spec.inputs),)
        with _quiet():
            program = torch.export.export(_Positional(graph, spec), args, dynamic_shapes=shapes, strict=False)
            result = torch.onnx.export(
                program,
                (),
                custom_translation_table=_translations(),
                input_names=[t.name for t in spec.inputs],
                output_names=[t.name for t in spec.outputs],
                opset_version=OPSET,
                optimize=False,
                verify=False,
                verbose=False,
            )
    assert result is not None
    model = result.model
    for value, port in zip((*model.graph.inputs, *model.graph.outputs), (*spec.inputs, *spec.outputs), strict=True):
        value.shape = ir.Shape(port.shape)
    _strip_prefix(model)
    _strip_traces(model)
    plain_nodes.settle(model)
    return model


def _fake_parameters(graph: Graph, dtypes: dict[str, torch.dtype]) -> None:
    for module_name, module in graph.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            key = f"{module_name}.{name}" if module_name else name
            fake = torch.empty(parameter.shape, dtype=dtypes[key])
            setattr(module, name, nn.Parameter(fake, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):  # constants: the caller kept their values
            setattr(module, name, nn.Buffer(torch.empty(buffer.shape), persistent=False))


def _example(spec: TensorSpec) -> Tensor:
    shape = [_EXAMPLE_SIZES[d] if isinstance(d, str) else d for d in spec.shape]
    return torch.empty(shape, dtype=getattr(torch, spec.dtype))


def _strip_prefix(model: ir.Model) -> None:
    """Initializers are called like the checkpoint's tensors again (the wrapper put `module.` before them)."""
    initializers = model.graph.initializers
    for name in list(initializers):
        value = initializers.pop(name)
        value.name = name.removeprefix("module.")
        initializers[value.name] = value


def _strip_traces(model: ir.Model) -> None:
    """Graphs tell nobody where the exporting machine keeps its files."""
    for node in model.graph:
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about packages that this model does not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- translation of the custom ops ----------------------------------------------------------------


@cache
def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """torch op of each form -> function that emits its node."""
    return {
        getattr(torch.ops.flashnext, torch_ops.torch_name(op.name, form.name)).default: onnx_schemas.emit(op, form)
        for op in schema.OPS
        for form in op.forms
    }
