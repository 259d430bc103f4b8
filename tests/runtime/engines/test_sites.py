"""Sites: every op on the residual branches, in the model's order, in the ONNX graphs and in PyTorch alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from flashnext.export.errors import BundleError
from flashnext.export.graphs.io import graph_spec
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.graphs.manifest_checks import options_of
from flashnext.runtime.engines.sites import sites, watched_spec
from flashnext.runtime.engines.watched_graph import watch

GRAPHS = ("head", "body", "mtp", "mtp_draft")


@pytest.fixture(scope="module")
def manifest(random_bundle: Path) -> Manifest:
    return Manifest.read(random_bundle)


def model_of(bundle: Path, manifest: Manifest, graph: str) -> onnx.ModelProto:
    return onnx.load(bundle / manifest.graphs[graph].file, load_external_data=False)


@pytest.mark.parametrize("graph", GRAPHS)
def test_watched_graph_is_sound_and_has_the_outputs(random_bundle: Path, manifest: Manifest, graph: str) -> None:
    model = watch(model_of(random_bundle, manifest, graph), manifest, graph)
    assert [value.name for value in model.graph.output] == [t.name for t in watched_spec(manifest, graph).outputs]
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in outside:  # the checker would look for its file
        model.graph.initializer.remove(tensor)
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.checker.check_model(model, full_check=True)


def test_names_and_suspects(manifest: Manifest) -> None:
    found = {
        spec.name: site.suspect(spec.name.rsplit(".", 1)[1])
        for graph in ("head", "body")
        for site in sites(manifest, graph)
        for spec in site.ports.values()
    }
    assert found["layers.0.attn_hyper_connection.start"] == "embed_tokens"
    assert found["layers.0.mlp_hyper_connection.y"] == "layers.0.linear_attn"
    assert found["layers.0.mlp_hyper_connection.r"] == "layers.0.mlp_hyper_connection"
    assert found["layers.1.ple.r"] == "layers.1.ple"
    assert found["layers.2.attn_hyper_connection.y"] == "layers.1.mlp"
    last = manifest.config.num_hidden_layers - 1
    assert found["hyper_connection_mixer.y"] == f"layers.{last}.mlp"


def test_specifications_of_the_modes(manifest: Manifest) -> None:
    """Codes are watched as codes; the draft layer starts otherwise with them."""
    for mode in ("static", "dynamic"):
        coded = dataclasses.replace(manifest, residual_mode=mode)
        forms = {site.form for graph in GRAPHS for site in sites(coded, graph)}
        assert forms == {f"{form}_fp8_{mode}" for form in ("embed", "pending", "settled", "last", "start")}
        dtypes = {t.name.rsplit(".", 1)[1]: t.dtype for g in GRAPHS for s in sites(coded, g) for t in s.ports.values()}
        assert dtypes["r"] == "float8_e4m3fn"
        assert dtypes["s"] == "float32"
    assert graph_spec(manifest.config, options_of(manifest), "head").outputs == manifest.graphs["head"].outputs


def lost(model: onnx.ModelProto) -> None:
    """A node fewer."""
    model.graph.node.remove(next(n for n in model.graph.node if n.op_type == "GatedResidual"))


def exchanged(model: onnx.ModelProto) -> None:
    """Two nodes have each other's weights."""
    first, second = [n for n in model.graph.node if n.op_type == "GatedResidual" and len(n.input) == 7][:2]
    for place in range(3, 7):
        first.input[place], second.input[place] = second.input[place], first.input[place]


def another_form(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.op_type == "GatedResidual")
    next(a for a in node.attribute if a.name == "form").s = b"last"


@pytest.mark.parametrize("damage", [lost, exchanged, another_form])
def test_graph_of_another_model_is_refused(
    random_bundle: Path, manifest: Manifest, damage: Callable[[onnx.ModelProto], None]
) -> None:
    model = model_of(random_bundle, manifest, "body")
    damage(model)
    with pytest.raises(BundleError, match="Export the bundle again"):
        watch(model, manifest, "body")
