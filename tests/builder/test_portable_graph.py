"""The portable form for TensorRT for RTX: plain operators, no branch on the step's size, codes in words."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from flashnext.builder.portable_graph import all_nodes, portable_form
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.errors import BuildError
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_only_plain_nodes_that_name_their_custom_node(random_bundle: Path, step: str) -> None:
    window = Manifest.read(random_bundle).window
    made = portable_form((random_bundle / "body.onnx").read_bytes(), window, step)
    model = onnx.load_model_from_string(made.model)
    assert not model.functions
    assert {n.domain for n in all_nodes(model.graph.node)} == {""}
    assert len(made.custom_nodes) == made.nodes.total()
    starts = {n.name.partition("/")[0] for n in all_nodes(model.graph.node) if "/" in n.name}
    assert starts == set(made.custom_nodes)
    kinds = [n.op_type for n in all_nodes(model.graph.node)]
    assert ("Loop" in kinds) == (step == "prefill")  # a loop over experts; decode gathers them
    loops_in_branches = [n for n in model.graph.node if n.op_type == "If"]
    assert not loops_in_branches
    assert made.weights == ()
    external = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    freed = portable_form((random_bundle / "body.onnx").read_bytes(), window, step, weights_as_inputs=True)
    assert set(freed.weights) == {t.name for t in external}


def test_codes_stand_in_words_of_four(tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 64, "ple_layer_ids": []}
    write_random_checkpoint(tmp_path / "c", fields, layers=1, mtp=False, tokenizer=False, quantization="nvfp4")
    export_bundle(tmp_path / "c", tmp_path / "b", ExportOptions(capacity=32, slots=1))
    made = portable_form((tmp_path / "b/body.onnx").read_bytes(), 8, "decode")
    inputs = {v.name: v.type.tensor_type for v in onnx.load_model_from_string(made.model).graph.input}
    weight = "layers.0.mlp.experts.gate_up_proj"
    assert made.codes[weight] == "int32"
    assert inputs[weight].elem_type == TensorProto.INT32
    assert inputs[weight].shape.dim[-1].dim_value == 64 // 2 // 4
    assert TensorProto.UINT8 not in {t.elem_type for t in inputs.values()}


def test_rows_that_are_no_whole_words_are_refused(tmp_path: Path) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 32, "ple_layer_ids": []}
    write_random_checkpoint(tmp_path / "c", fields, layers=1, mtp=False, tokenizer=False, quantization="nvfp4")
    export_bundle(tmp_path / "c", tmp_path / "b", ExportOptions(capacity=32, slots=1))
    with pytest.raises(BuildError, match=r"rows of 2 codes; TensorRT for RTX takes 4 at a time\. Build with"):
        portable_form((tmp_path / "b/body.onnx").read_bytes(), 8, "decode")
