"""Graphs that go with golden files: a bundle's graphs with their weights inside, for tools that bind no inputs.

An engine binds embedding, LM head and experts once for all graphs, so they are inputs of a bundle's graphs. A tool
would have to be fed them with every step. Here they become initializers that point into the checkpoint's own files, as
all other weights do; what the checkpoint stores in another dtype is cast in the graph, and experts that it stores one
by one are put together in one file beside the graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import onnx

from flashnext.builder.plugin_graph import plugin_form
from flashnext.builder.portable_graph import portable_form
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.graph_files import read_graph
from flashnext.runtime.engines.watched_graph import watch
from flashnext.runtime.weights import EXPERT, load_weight

PORTABLE, PLUGIN, RTX = "portable", "plugin", "rtx"
TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "uint8": onnx.TensorProto.UINT8,
}


class WeightFile:
    """The file of the weights that the checkpoint does not hold in one piece: first planned, then written."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nbytes = 0
        self._places: dict[str, tuple[WeightSpec, int, int]] = {}

    def place(self, spec: WeightSpec) -> tuple[int, int]:
        """Offset and length of a weight."""
        if spec.name not in self._places:
            length = _nbytes(spec)
            self._places[spec.name] = (spec, self.nbytes, length)
            self.nbytes += length
        return self._places[spec.name][1:]

    def write(self, path: Path, checkpoint: Checkpoint) -> None:
        """Write it, if there is anything to write, a weight at a time."""
        if self._places:
            with path.open("wb") as stream:
                for spec, _, _ in self._places.values():
                    stream.write(load_weight(spec, checkpoint).tobytes())


def is_one_piece(spec: WeightSpec) -> bool:
    """Whether the checkpoint holds a weight as it lies in the graph, but for its dtype."""
    return len(spec.sources) == 1 and EXPERT not in spec.sources[0]


def build(
    bundle: Path, manifest: Manifest, checkpoint: Checkpoint, file: WeightFile | None, per_layer: bool
) -> dict[str, dict[str, onnx.ModelProto]]:
    """Every graph of a bundle in each form; without `file` weights stay inputs.

    "portable": as it is in the bundle. "plugin": for TensorRT. "rtx": for TensorRT for RTX, inlined, for steps of at
    most W tokens a sequence; left out where that builder cannot take the checkpoint's codes.

    Raises:
        EngineError: a graph is not the one that the manifest describes.
        BundleError: its ops are not those of the model.
    """
    made: dict[str, dict[str, onnx.ModelProto]] = {}
    for name, spec in manifest.graphs.items():
        portable = onnx.load_model_from_string(read_graph(bundle / spec.file, spec))
        if per_layer:
            watch(portable, manifest, name)
        source = portable.SerializeToString()
        made[name] = {PORTABLE: portable, PLUGIN: onnx.load_model_from_string(plugin_form(source).model)}
        with suppress(BuildError):
            made[name][RTX] = onnx.load_model_from_string(portable_form(source, manifest.window, "decode").model)
        if file is not None:
            for model in made[name].values():
                weights_inside(model, manifest.weights, checkpoint, file)
    return made


def weights_inside(
    model: onnx.ModelProto, weights: Iterable[WeightSpec], checkpoint: Checkpoint, file: WeightFile
) -> onnx.ModelProto:
    """Turn the model's weight inputs into initializers; returns the same model, changed."""
    graph = model.graph
    inputs = {value.name: value for value in graph.input}
    for spec in weights:
        if spec.name in inputs:
            wanted = inputs[spec.name].type.tensor_type
            graph.input.remove(inputs[spec.name])
            initializer = _initializer(spec, wanted, checkpoint, file)
            graph.initializer.append(initializer)
            if initializer.name != spec.name:
                cast = onnx.helper.make_node(
                    "Cast", [initializer.name], [spec.name], name=spec.name, to=wanted.elem_type
                )
                graph.node.insert(0, cast)
    return model


def _initializer(
    spec: WeightSpec, wanted: onnx.TypeProto.Tensor, checkpoint: Checkpoint, file: WeightFile
) -> onnx.TensorProto:
    """The weight where it lies; with another name when it has to be cast first. Codes keep their bits."""
    shape = [size.dim_value for size in wanted.shape.dim]
    if not is_one_piece(spec):
        return _external(spec.name, wanted.elem_type, shape, file.name, *file.place(spec))
    info = checkpoint.tensors[spec.sources[0]]
    location = info.file.relative_to(checkpoint.common_parent).as_posix()
    dtype = NUMPY_DTYPES[info.dtype]
    as_is = str(dtype.name) == spec.dtype or (spec.dtype == "uint8" and dtype.itemsize == 1)
    name, stored = (spec.name, wanted.elem_type) if as_is else (f"{spec.name}.stored", TYPES[str(dtype.name)])
    return _external(name, stored, shape, location, info.offset, info.length)


def _external(name: str, dtype: int, shape: Iterable[int], location: str, offset: int, length: int) -> onnx.TensorProto:
    """An initializer whose values lie in a file beside the graph."""
    tensor = onnx.TensorProto(name=name, data_type=dtype, dims=list(shape))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _nbytes(spec: WeightSpec) -> int:
    size = numpy_dtype(spec.dtype).itemsize
    for dimension in spec.shape:
        size *= dimension
    return size


def files_of(model: onnx.ModelProto) -> set[str]:
    """Locations of all external data of a graph."""
    return {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
