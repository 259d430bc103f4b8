"""The plugin form of a graph: custom nodes that TensorRT binds to plugins, in place of portable functions.

TensorRT's ONNX parser takes a node whose `op_type` it does not know for a plugin. It looks for the creator of that
name in its registry, with the version and namespace of the node's attributes `plugin_version` and
`plugin_namespace`, and hands it the attributes that the creator has fields for. A function of that name in the model
would win, an overload is not looked at, and the node's domain does not matter. So this form

- has no functions and no overloads; the attribute `form` says which form a node is,
- names version and namespace,
- takes 8-bit codes as dtypes that a plugin may have: E4M3 codes as FLOAT8E4M3FN, packed E2M1 codes as INT8 (portable
  graphs take both as UINT8, which TensorRT allows at a network's edge only).

    plugin_form(Path("bundle/body.onnx").read_bytes())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from flashnext.export.errors import BundleError
from flashnext.export.ops import schema

PLUGIN_DTYPES = {"float8_e4m3fn": TensorProto.FLOAT8E4M3FN, "int8": TensorProto.INT8}
_ATTRIBUTE_TYPES = {
    "int": onnx.AttributeProto.INT,
    "float": onnx.AttributeProto.FLOAT,
    "string": onnx.AttributeProto.STRING,
}


@dataclass(frozen=True)
class PluginGraph:
    """A graph in plugin form: its bytes, how many nodes of each op and form it has, and which inputs were retyped."""

    model: bytes
    nodes: Counter[str]
    """By `Op.form`."""
    codes: dict[str, str]
    """New dtype ("float8_e4m3fn", "int8") of each input and output whose dtype is another than in the bundle."""
    weights: tuple[str, ...] = ()
    """Initializers that have become inputs: none."""


def plugin_form(graph: bytes, domain: str = schema.DOMAIN) -> PluginGraph:
    """The plugin form of a bundle's graph.

    Args:
        graph: an ONNX model as `flashnext export` writes it; external data is left where it is.
        domain: of the custom nodes. TensorRT does not look at it; ONNX Runtime's TensorRT provider wants "trt.plugins".

    Raises:
        BundleError: a custom node is not one of the op table.
    """
    model = onnx.load_model_from_string(graph)
    nodes: Counter[str] = Counter()
    codes: dict[str, str] = {}
    for node in model.graph.node:
        if node.domain != schema.DOMAIN:
            continue
        form = check_node(node)
        codes.update(_codes(node, form))
        nodes[f"{node.op_type}.{form.name}"] += 1
        node.ClearField("overload")
        node.domain = domain
        node.attribute.append(onnx.helper.make_attribute("plugin_version", schema.PLUGIN_VERSION))
        node.attribute.append(onnx.helper.make_attribute("plugin_namespace", schema.PLUGIN_NAMESPACE))
    del model.functions[:]
    for opset in model.opset_import:
        if opset.domain == schema.DOMAIN:
            opset.domain = domain
    _retype(model.graph, codes)
    return PluginGraph(model.SerializeToString(), nodes, codes)


def check_node(node: onnx.NodeProto) -> schema.Form:
    """The form of a custom node, whose attributes, inputs and outputs are those of the op table.

    Raises:
        BundleError: they are not.
    """
    attributes = {a.name: a for a in node.attribute}
    try:
        op = schema.op(node.op_type)
        form = op.form(attributes["form"].s.decode())
    except KeyError as unknown:
        raise _wrong(node, f"has no known op and form ({unknown.args[0]})") from None
    wanted = {a.name: _ATTRIBUTE_TYPES[a.kind] for a in op.attributes} | {"form": onnx.AttributeProto.STRING}
    found = {name: a.type for name, a in attributes.items()}
    if found != wanted:
        raise _wrong(node, f"has the attributes {sorted(found)}, expected {sorted(wanted)}")
    for what, names, ports in (("inputs", node.input, form.inputs), ("outputs", node.output, form.outputs)):
        if len(names) != len(ports) or not all(names):
            raise _wrong(node, f"has {len(names)} {what}, expected {len(ports)}")
    return form


def _wrong(node: onnx.NodeProto, fault: str) -> BundleError:
    return BundleError(f"The node {node.name!r:.100} ({node.op_type!r:.40}) {fault:.300}. Export the bundle again.")


def _codes(node: onnx.NodeProto, form: schema.Form) -> Iterator[tuple[str, str]]:
    """Inputs and outputs of a node that a plugin takes or gives as another dtype, and that dtype."""
    for names, ports in ((node.input, form.inputs), (node.output, form.outputs)):
        for name, port in zip(names, ports, strict=True):
            if port.dtype in schema.PLUGIN_DTYPES:
                yield name, schema.PLUGIN_DTYPES[port.dtype]


def _retype(graph: onnx.GraphProto, codes: dict[str, str]) -> None:
    edges = {value.name for value in (*graph.input, *graph.output)}
    if inside := sorted(codes.keys() - edges):
        raise BundleError(f"{inside[0]!r:.100} holds 8-bit codes inside the graph. Export the bundle again.")
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name in codes:
            value.type.tensor_type.elem_type = PLUGIN_DTYPES[codes[value.name]]
    readers = [n.name for n in _other_nodes(graph) if {*n.input, *n.output} & codes.keys()]
    if readers:
        raise BundleError(f"{readers[0]!r:.100} works on codes that only plugins may read. Export the bundle again.")


def _other_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    return (n for n in graph.node if not any(a.name == "plugin_version" for a in n.attribute))
