"""The form of a graph for TensorRT for RTX, which has no plugins: plain operators only, for one kind of step.

Made from a bundle's graph by attaching portable functions anew, without branches on the step's size (that builder
makes no loop inside a branch), and inlining them (its parser confuses functions). So a bundle's graph gives two: one
for steps of at most W tokens a sequence ("decode": the chosen experts are gathered), one for longer steps ("prefill":
a loop over experts). What that builder cannot take is put otherwise, with the same bits:

- 8-bit codes stand in words of four, int32: it gathers and scatters no bytes. The same memory is bound.
- Casts to FP8 are quantizations with a scale of 1.

Every node is named after the custom node that it comes from (`layers.0/GatedDeltaNet/matmul_12`, say), by which
plan_text.py accounts for each of them in a plan.

    portable_form(Path("bundle/body.onnx").read_bytes(), window=8, step="decode")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir
from onnx import TensorProto, inliner

from flashnext.builder.plugin_graph import check_node
from flashnext.export.errors import BuildError
from flashnext.export.graphs import functions
from flashnext.export.ops import schema
from flashnext.export.ops.portable.context import Steps
from flashnext.export.ops.portable.fp8_codes import CODES_OF_A_WORD, WORDS

STEPS: dict[str, Steps] = {"decode": "few", "prefill": "many"}
SEPARATOR = "/"


@dataclass(frozen=True)
class PortableGraph:
    """A graph of plain operators: its bytes, the custom nodes that it is made of, and what is bound otherwise."""

    model: bytes
    nodes: Counter[str]
    """Custom nodes by `Op.form`."""
    custom_nodes: tuple[str, ...]
    """Their names, which the names of their plain nodes begin with."""
    codes: dict[str, str] = field(default_factory=dict)
    """"int32" for each input and output that holds codes in words."""
    weights: tuple[str, ...] = ()
    """Initializers that have become inputs, by their names in the checkpoint."""


def portable_form(graph: bytes, window: int, step: str, weights_as_inputs: bool = False) -> PortableGraph:
    """The form of a bundle's graph for one kind of step.

    Args:
        graph: an ONNX model as `flashnext export` writes it; external data is left where it is.
        window: the bundle's W.
        step: "decode" or "prefill".
        weights_as_inputs: make inputs of the initializers that lie in the checkpoint, so that no plan holds them.

    Raises:
        BundleError: a custom node is not one of the op table.
        BuildError: codes whose rows are no whole number of words.
    """
    proto = onnx.load_model_from_string(graph)
    ports = list(_code_ports(proto.graph))
    model = ir.serde.deserialize_model(proto)
    nodes = functions.attach(model, window, STEPS[step], words=True)
    proto = ir.serde.serialize_model(model)
    names = _name_layers(proto)
    _use_words(proto.graph, ports)
    weights = _free_weights(proto.graph) if weights_as_inputs else ()
    proto = inliner.inline_local_functions(proto)
    return PortableGraph(proto.SerializeToString(), nodes, names, dict.fromkeys(ports, WORDS), weights)


def _code_ports(graph: onnx.GraphProto) -> Iterator[str]:
    """Inputs and outputs of custom nodes that hold codes in bytes."""
    for node in graph.node:
        if node.domain != schema.DOMAIN:
            continue
        form = check_node(node)
        for names, ports in ((node.input, form.inputs), (node.output, form.outputs)):
            yield from (n for n, p in zip(names, ports, strict=True) if p.dtype in schema.PLUGIN_DTYPES)


def _use_words(graph: onnx.GraphProto, ports: list[str]) -> None:
    """Retype the graph's inputs and outputs that hold codes: a fourth of the columns, four codes in each."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in ports:
            kind = value.type.tensor_type
            columns = kind.shape.dim[-1].dim_value
            if columns % CODES_OF_A_WORD:
                raise BuildError(
                    f"{value.name} has rows of {columns} codes; TensorRT for RTX takes {CODES_OF_A_WORD} at a time. "
                    "Build with --engine tensorrt, or export an unquantized checkpoint."
                )
            kind.elem_type, kind.shape.dim[-1].dim_value = TensorProto.INT32, columns // CODES_OF_A_WORD


def _free_weights(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Make inputs of the initializers that are external data; returns their names."""
    external = [t for t in graph.initializer if t.data_location == TensorProto.EXTERNAL]
    kept = [t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL]
    graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in external)
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return tuple(t.name for t in external)


def _name_layers(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Give every custom node a function of its own, whose nodes bear its name; returns the custom nodes' names."""
    shared = {(f.name, f.overload): f for f in proto.functions}
    del proto.functions[:]
    names = []
    for index, node in enumerate(n for n in proto.graph.node if n.domain == schema.DOMAIN):
        name = f"{node.op_type}.{index}"
        function = proto.functions.add()
        function.CopyFrom(shared[node.op_type, node.overload])
        node.overload = function.overload = f"{function.overload}.{index}"
        for inner in all_nodes(function.node):
            inner.name = f"{name}{SEPARATOR}{inner.name}"
        names.append(name)
    return tuple(names)


def all_nodes(nodes: Iterator[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and those of their subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from all_nodes(attribute.g.node)
