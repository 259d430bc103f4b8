"""A graph's weights lie inside the checkpoint's files, or the graph is refused before TensorRT sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from flashnext.builder.source_graph import check_axes, read_graph, weight_bytes
from flashnext.export.errors import BundleError
from flashnext.export.graphs import plain_nodes
from flashnext.export.graphs.manifest import Manifest

Tensor = onnx.TensorProto


def put(tensor: Tensor, key: str, value: str) -> None:
    next(entry for entry in tensor.external_data if entry.key == key).value = value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: put(t, "location", "../outside.safetensors"), "no file of the checkpoint"),
        (lambda t: put(t, "location", "config.json"), "no file of the checkpoint"),
        (lambda t: put(t, "offset", str(1 << 40)), "does not fit into"),
        (lambda t: put(t, "offset", "-8"), "does not fit into"),
        (lambda t: put(t, "length", "8"), "does not fit into"),
        (lambda t: put(t, "length", "many"), "does not fit into"),
        (lambda t: t.dims.append(1 << 40), "does not fit into"),
        (lambda t: setattr(t, "data_type", Tensor.INT64), "no dtype of weights"),
    ],
)
def test_a_weight_that_lies_elsewhere_is_refused(
    tiny_bundle: Path, change: Callable[[Tensor], object], sentence: str
) -> None:
    manifest = Manifest.read(tiny_bundle)
    folder = Path(manifest.checkpoint.common_parent)
    graph = read_graph(tiny_bundle, manifest.graphs["body"])
    model = onnx.load_model_from_string(graph)
    tensor = next(t for t in model.graph.initializer if t.data_location == Tensor.EXTERNAL)
    assert weight_bytes(graph, manifest, folder) > 0
    change(tensor)
    with pytest.raises(BundleError, match=sentence):
        weight_bytes(model.SerializeToString(), manifest, folder)


def test_axes_that_are_computed_are_of_an_earlier_release() -> None:
    """As torch.onnx leaves them: the constant axes of a mean go through a reshape to one dimension."""
    text = """<ir_version: 10, opset_import: ["": 23]> g (float[B, 4] x) => (float[B] y) {
        axes = Constant <value: tensor = int64[1] {-1}> ()
        shape = Constant <value: tensor = int64[1] {-1}> ()
        settled = Reshape (axes, shape)
        [mean] y = ReduceMean <keepdims: int = 0> (x, settled)
    }"""
    model = onnx.parser.parse_model(text)
    with pytest.raises(BundleError, match=r"mean \(ReduceMean\) computes the axes .* Export the bundle again"):
        check_axes(model)
    now = ir.serde.deserialize_model(model)
    plain_nodes.settle(now)
    check_axes(ir.serde.serialize_model(now))


def test_a_checkpoint_that_is_not_there_is_told(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(tiny_bundle)
    with pytest.raises(BundleError, match=r"cannot be read .*--checkpoint FOLDER"):
        weight_bytes(read_graph(tiny_bundle, manifest.graphs["body"]), manifest, tmp_path)
