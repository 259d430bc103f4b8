"""The plugin form: what TensorRT's parser needs to find the plugins, and nodes that are those of the op table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from flashnext.builder.plugin_graph import plugin_form
from flashnext.export.errors import BundleError
from flashnext.export.ops import onnx_schemas, schema

GRAPHS = ("head", "body", "mtp", "mtp_draft")


@pytest.fixture(params=["plain", "quantized"])
def bundle(request: pytest.FixtureRequest, random_bundle: Path, quantized_bundle: Path) -> Path:
    return random_bundle if request.param == "plain" else quantized_bundle


@pytest.mark.parametrize("name", GRAPHS)
def test_every_custom_node_is_one_of_the_table_and_names_its_creator(bundle: Path, name: str) -> None:
    before = onnx.load(bundle / f"{name}.onnx", load_external_data=False)
    made = plugin_form((bundle / f"{name}.onnx").read_bytes())
    after = onnx.load_model_from_string(made.model)

    custom = [n for n in after.graph.node if n.domain == schema.DOMAIN]
    assert len(custom) == sum(n.domain == schema.DOMAIN for n in before.graph.node) == made.nodes.total()
    assert not after.functions
    for node in custom:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert not node.overload
        assert attributes["plugin_version"] == schema.PLUGIN_VERSION.encode()
        assert attributes["plugin_namespace"] == schema.PLUGIN_NAMESPACE.encode()
    forms = [next(a.s.decode() for a in n.attribute if a.name == "form") for n in custom]
    assert Counter(f"{n.op_type}.{form}" for n, form in zip(custom, forms, strict=True)) == made.nodes
    # Attributes, numbers of inputs and outputs, dtypes and shapes of every node: by the schemas of the op table.
    onnx_schemas.register()
    onnx.shape_inference.infer_shapes(after, check_type=True, strict_mode=True)


def test_codes_become_dtypes_that_plugins_may_have(quantized_bundle: Path) -> None:
    made = plugin_form((quantized_bundle / "body.onnx").read_bytes())
    graph = onnx.load_model_from_string(made.model).graph
    types = {v.name: v.type.tensor_type.elem_type for v in graph.input}
    experts = "layers.{}.mlp.experts.{}"
    nvfp4, blocks = 1, 2  # layers, by random_quantized.QUANTIZATIONS["mixed"]
    assert types[experts.format(nvfp4, "gate_up_proj")] == types[experts.format(nvfp4, "down_proj")] == TensorProto.INT8
    assert types[experts.format(nvfp4, "gate_up_scale")] == TensorProto.FLOAT8E4M3FN
    assert types[experts.format(blocks, "gate_up_proj")] == TensorProto.FLOAT8E4M3FN
    assert types[experts.format(blocks, "gate_up_scale")] == TensorProto.FLOAT
    assert TensorProto.UINT8 not in types.values()
    assert made.codes[experts.format(nvfp4, "down_proj")] == "int8"
    assert made.codes[experts.format(nvfp4, "down_scale")] == "float8_e4m3fn"


def test_another_domain_for_another_parser(random_bundle: Path) -> None:
    made = plugin_form((random_bundle / "head.onnx").read_bytes(), domain="trt.plugins")
    model = onnx.load_model_from_string(made.model)
    assert {n.domain for n in model.graph.node} == {"", "trt.plugins"}
    assert {o.domain for o in model.opset_import} >= {"", "trt.plugins"}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("form", "no known op and form"), ("attribute", "attributes"), ("input", "inputs"), ("output", "outputs")],
)
def test_a_node_that_is_not_of_the_table_is_refused(random_bundle: Path, fault: str, sentence: str) -> None:
    model = onnx.load(random_bundle / "head.onnx", load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "GatedResidual")
    if fault == "form":
        next(a for a in node.attribute if a.name == "form").s = b"elsewhere"
    elif fault == "attribute":
        del node.attribute[next(i for i, a in enumerate(node.attribute) if a.name == "eps")]
    else:
        getattr(node, fault).pop()
    with pytest.raises(BundleError, match=sentence):
        plugin_form(model.SerializeToString())
