"""Exported graphs and the plugins: every custom node can be created with what TensorRT's parser sends, in the real
registry, and no plugin has an output that nobody reads (which TensorRT's builder has failed on)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from test_registry import probe

from flashnext.builder.plugin_graph import plugin_form
from flashnext.export.ops import schema
from flashnext.plugins.tensorrt import library

pytest.importorskip("tensorrt_lean_bindings")

GRAPHS = ("head", "body", "mtp", "mtp_draft")
PARSER_TYPES = {"INT": "INT32", "FLOAT": "FLOAT32", "STRING": "CHAR"}
OF_THE_PARSER = {"plugin_version", "plugin_namespace"}
"""Attributes that say where the creator is; no fields."""


@pytest.fixture(scope="module")
def bundles(random_bundle: Path, quantized_bundle: Path) -> list[Path]:
    return [random_bundle, quantized_bundle]


def graphs(bundles: list[Path]) -> Iterator[tuple[str, onnx.GraphProto]]:
    for bundle in bundles:
        for name in GRAPHS:
            model = onnx.load_model_from_string(plugin_form((bundle / f"{name}.onnx").read_bytes()).model)
            yield f"{bundle.name}/{name}", model.graph


def custom_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.domain == schema.DOMAIN]


def form_of(node: onnx.NodeProto) -> str:
    return next(a.s.decode() for a in node.attribute if a.name == "form")


def parser_fields(node: onnx.NodeProto, listed: list[str]) -> list[list[Any]]:
    """The fields that the parser makes of a node's attributes: those that the creator lists."""
    given = {a.name: a for a in node.attribute}
    kinds = {name: PARSER_TYPES[onnx.AttributeProto.AttributeType.Name(a.type)] for name, a in given.items()}
    values = {name: onnx.helper.get_attribute_value(a) for name, a in given.items()}
    decoded = {name: v.decode() if isinstance(v, bytes) else v for name, v in values.items()}
    return [[name, kinds[name], decoded[name]] for name in listed if name in given]


def test_every_node_can_be_created(host_plugins: library.LibraryInfo, bundles: list[Path], tmp_path: Path) -> None:
    listed = {c["name"]: [name for name, _ in c["fields"]] for c in probe(host_plugins.path, [], tmp_path)["creators"]}
    requests, forms = [], Counter[str]()
    for _, graph in graphs(bundles):
        for node in custom_nodes(graph):
            fields = parser_fields(node, listed[node.op_type])
            named = {name for name, _, _ in fields}
            # Nothing of the node is lost on the way, and only what has a value of its own is missing.
            assert {a.name for a in node.attribute} - named == OF_THE_PARSER
            assert set(listed[node.op_type]) - named <= {"aliased"}
            place = {a.name.removeprefix("plugin_"): a.s.decode() for a in node.attribute if a.name in OF_THE_PARSER}
            requests.append({"op": node.op_type, "phase": "BUILD", "fields": fields, **place})
            forms[f"{node.op_type}.{form_of(node)}"] += 1
    results = probe(host_plugins.path, requests, tmp_path)["results"]
    assert [r for r in results if r != {"made": True, "log": []}] == []
    assert {form.partition(".")[0] for form in forms} == {op.name for op in schema.OPS}
    assert {"SparseMoE.nvfp4", "SparseMoE.fp8_block", "SparseAttention.select_fp8_cache"} <= set(forms)


def test_every_output_is_read(bundles: list[Path]) -> None:
    for name, graph in graphs(bundles):
        read = Counter(i for node in graph.node for i in node.input) + Counter(o.name for o in graph.output)
        unread = [o for node in custom_nodes(graph) for o in node.output if not read[o]]
        assert unread == [], name


def test_a_state_feeds_one_plugin_and_comes_from_it(bundles: list[Path]) -> None:
    """So that both ends can be bound to one address: the pattern that spares TensorRT a copy."""
    states = 0
    for name, graph in graphs(bundles):
        inputs, outputs = {i.name for i in graph.input}, {o.name for o in graph.output}
        readers = Counter(i for node in graph.node for i in node.input)
        for node in custom_nodes(graph):
            form = schema.op(node.op_type).form(form_of(node))
            names = [p.name for p in form.inputs]
            for port, output in zip(form.outputs, node.output, strict=True):
                if port.name in form.aliases:
                    state = node.input[names.index(form.aliases[port.name])]
                    assert state in inputs, (name, state)
                    assert readers[state] == 1, (name, state)
                    assert output in outputs, (name, output)
                    assert readers[output] == 0, (name, output)
                    states += 1
    assert states > 20
