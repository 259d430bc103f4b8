"""A copy of an ONNX graph that also gives what happens at its sites, for `--per-layer` (see `sites.py`).

Each watched value passes through an Identity to an output of its own, so the graph's other outputs keep their names
and its nodes stay as they are. A node is told by its place in the order, and its weights' names have to agree.

    model = watch(onnx.load("bundle/body.onnx", load_external_data=False), manifest, "body")
"""

from __future__ import annotations

import onnx

from flashnext.export.errors import BundleError
from flashnext.export.graphs.manifest import Manifest, TensorSpec
from flashnext.export.ops import schema
from flashnext.runtime.engines.sites import WATCHED_OPS, Site, sites

_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
}

MOST_CASTS = 3
"""In a row; the export writes one at most."""


def watch(model: onnx.ModelProto, manifest: Manifest, graph: str) -> onnx.ModelProto:
    """Add the sites' outputs to a graph of a bundle; returns the same model, changed.

    Raises:
        BundleError: its ops on the residual branches are not those of the model.
    """
    nodes = [n for n in model.graph.node if n.domain == schema.DOMAIN and n.op_type in WATCHED_OPS]
    expected = sites(manifest, graph)
    if len(nodes) != len(expected):
        raise BundleError(
            f"The graph {graph} has {len(nodes)} ops on the residual branches, the model {len(expected)}. "
            "Export the bundle again."
        )
    weights = _Weights(model)
    for node, site in zip(nodes, expected, strict=True):
        _check(node, site, weights)
        form = schema.op(site.op).form(site.form)
        names = {p.name: n for p, n in zip(form.inputs, node.input, strict=True)}
        names |= {p.name: n for p, n in zip(form.outputs, node.output, strict=True)}
        for port, spec in site.ports.items():
            model.graph.node.append(onnx.helper.make_node("Identity", [names[port]], [spec.name], name=spec.name))
            model.graph.output.append(_value_info(spec))
    return model


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(spec.name, _TYPES[spec.dtype], list(spec.shape))


def _check(node: onnx.NodeProto, site: Site, weights: _Weights) -> None:
    form = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "form"), "")
    found = {name for i in node.input if (name := weights.source(i))}
    if (node.op_type, form) != (site.op, site.form) or not any(name.startswith(f"{site.name}.") for name in found):
        raise BundleError(
            f"The graph has the node {node.op_type} {form} ({', '.join(sorted(found))!s:.120}) where the model has "
            f"{site.op} {site.form} of {site.name}. Export the bundle again."
        )


class _Weights:
    """Which initializer a value comes from, casts aside."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._names = {tensor.name for tensor in model.graph.initializer}
        self._casts = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Cast"}

    def source(self, value: str) -> str | None:
        """The initializer's name."""
        for _ in range(MOST_CASTS):
            if value in self._names:
                return value
            value = self._casts.get(value, "")
        return None
