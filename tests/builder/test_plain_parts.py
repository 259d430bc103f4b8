"""What lies between the plugins, cut at the custom nodes, is parsed and built by a real builder without a GPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from flashnext.builder.engine_manifest import Range
from flashnext.builder.job import PlanJob
from flashnext.builder.plain_parts import cut
from flashnext.builder.plan_process import build_in_process
from flashnext.builder.plugin_graph import plugin_form
from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.ops import schema

from .conftest import needs_rtx

SIZES = {"B": (1, 1, 2), "S": (1, 1, 8), "N": (1, 1, 16)}


def build(graph: bytes, weights: str, folder: Path) -> int:
    """Build a graph's plain parts; the plan's size."""
    model = onnx.load_model_from_string(graph)
    ranges = {}
    for value in model.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        if any(d in SIZES for d in dims):
            ranges[value.name] = Range(*(tuple(SIZES[d][i] if d in SIZES else d for d in dims) for i in range(3)))
    (folder / "graph.onnx").write_bytes(graph)
    build_in_process(PlanJob("tensorrt-rtx", "graph.onnx", "parts.plan", weights, (ranges,), (120,)), folder)
    return (folder / "parts.plan").stat().st_size


@needs_rtx
@pytest.mark.parametrize("name", ["body", "mtp"])
def test_plain_parts_can_be_built(quantized_bundle: Path, tmp_path: Path, name: str) -> None:
    made = plugin_form((quantized_bundle / f"{name}.onnx").read_bytes())
    parts = cut(made.model)
    graph = onnx.load_model_from_string(parts).graph
    assert not any(n.domain == schema.DOMAIN for n in graph.node)
    before = onnx.load_model_from_string(made.model).graph
    assert len(graph.node) == len(before.node) - made.nodes.total()
    assert build(parts, Manifest.read(quantized_bundle).checkpoint.common_parent, tmp_path) > 0


@needs_rtx
def test_parts_that_cannot_be_built_are_noticed(quantized_bundle: Path, tmp_path: Path) -> None:
    """The cast that the export puts a dequantization in place of."""
    graph = onnx.load_model_from_string(cut(plugin_form((quantized_bundle / "mtp.onnx").read_bytes()).model))
    node = next(n for n in graph.graph.node if n.op_type == "DequantizeLinear")
    node.op_type = "Cast"
    del node.input[1:]
    node.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.FLOAT))
    with pytest.raises(BuildError, match="FP8"):
        build(graph.SerializeToString(), Manifest.read(quantized_bundle).checkpoint.common_parent, tmp_path)


def test_a_custom_node_that_contradicts_the_table_is_noticed(random_bundle: Path) -> None:
    model = onnx.load_model_from_string(plugin_form((random_bundle / "head.onnx").read_bytes()).model)
    node = next(n for n in model.graph.node if n.op_type == "GatedDeltaNet")
    next(a for a in node.attribute if a.name == "key_heads").i += 1
    with pytest.raises(onnx.shape_inference.InferenceError, match="GatedDeltaNet"):
        cut(model.SerializeToString())
