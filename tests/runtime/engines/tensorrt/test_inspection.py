"""Engines in which TensorRT moves a state are refused, by what the inspector of TensorRT 10 and 11 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.tensorrt.inspection import check_states_stay, moved_states

STATES = {"layers.0.conv_state": "layers.0.conv_state_out", "layers.0.recurrent_state": "layers.0.recurrent_state_out"}


def tensor(name: str, version: int = 11) -> dict[str, Any]:
    """An input or output of a layer: TensorRT 11 has apart what 10 has in one field."""
    form = {"Format/Datatype": "Row major linear FP32"}
    if version == 11:
        form = {"Format": "Row major linear FP32 format (kLINEAR)", "DataType": "Float"}
    return {"Name": name, "Location": "Device", "Dimensions": [3, 4, 16, 16], **form}


def layer(kind: str, name: str, inputs: list[str], outputs: list[str], version: int = 11) -> dict[str, Any]:
    return {
        "Name": name,
        "LayerType": kind,
        "Inputs": [tensor(n, version) for n in inputs],
        "Outputs": [tensor(n, version) for n in outputs],
        "TacticValue": "0x0000000000000000",
        "StreamId": 0,
        "Metadata": f"[ONNX Layer: {name}]",
    }


def engine(*layers: Any, version: int = 11) -> str:
    edges = (
        {"Bindings": [*STATES]} if version == 10 else {"I/O Tensors": [{"Name": n, "IOMode": "Input"} for n in STATES]}
    )
    return json.dumps({"Layers": list(layers), **edges})


PLUGIN = layer("PluginV3", "GatedDeltaNet_0", ["x", *STATES], ["y", *STATES.values()])


@pytest.mark.parametrize("version", [10, 11])
@pytest.mark.parametrize("side", ["in", "out"])
def test_a_reformat_of_a_state_is_found(version: int, side: str) -> None:
    state, out = "layers.0.conv_state", "layers.0.conv_state_out"
    name = "Reformatting CopyNode for Input Tensor 1 to GatedDeltaNet_0"
    moving = layer("Reformat", name, [state], ["Reformatted Input Tensor 1"], version)
    if side == "out":
        moving = layer("Reformat", f"{out} copy", ["GatedDeltaNet_0_output_1"], [out], version)
    harmless = layer("Reformat", "Reformatting CopyNode for Input Tensor 0 to MatMul", ["x"], ["y"], version)
    found = moved_states(engine(PLUGIN, harmless, moving, version=version), STATES)
    assert found == [(moving["Name"], state if side == "in" else out)]


def test_an_engine_whose_states_stay_passes() -> None:
    harmless = layer("Shuffle", "Reshape_3", ["y"], ["z"])
    assert moved_states(engine(PLUGIN, harmless, layer("gemm", "MatMul_1", ["z"], ["logits"])), STATES) == []


def test_a_state_inside_a_fused_layer_is_found() -> None:
    fused = layer("kgen", "__myl_Copy_0", ["layers.0.conv_state"], ["a copy"])
    assert moved_states(engine(fused, PLUGIN), STATES) == [("__myl_Copy_0", "layers.0.conv_state")]
    named = layer("GatedDeltaNet", "node_3", [*STATES], [*STATES.values()])  # as another release may call a plugin
    assert moved_states(engine(named), STATES) == []


def test_a_list_that_cannot_show_states_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Plan:
        def layers(self) -> str:
            return engine("MatMul_1", "GatedDeltaNet_0")  # its states are named among the network's tensors

    check_states_stay(Plan(), STATES, Path("body.plan"))
    assert "does not show which layers of body.plan touch its states" in caplog.text


def test_with_names_alone_a_state_in_a_copys_name_is_found() -> None:
    """What an engine says that was built with the default verbosity."""
    copied = "layers.0.recurrent_state_out copy"
    names = ["MatMul_1", "Reformatting CopyNode for Input Tensor 0 to MatMul_1", "GatedDeltaNet_0", copied]
    assert ("layers.0.recurrent_state_out copy", "layers.0.recurrent_state_out") in moved_states(engine(*names), STATES)
    assert moved_states(engine(*names[:3]), STATES) == []


def test_the_message_names_plan_layer_and_state() -> None:
    class Plan:
        def layers(self) -> str:
            return engine(layer("Reformat", "conv copy", ["a"], ["layers.0.conv_state_out"]))

    with pytest.raises(EngineError, match=r"body.plan moves the state layers.0.conv_state_out in the layer conv "):
        check_states_stay(Plan(), STATES, Path("body.plan"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"Layers": 3}',
        '{"Layers": [3]}',
        '{"Layers": [{"LayerType": "Reformat", "Inputs": [3]}]}',
    ],
)
def test_what_cannot_be_read_is_no_good_engine(text: str) -> None:
    with pytest.raises(EngineError, match="inspector answers with what cannot be read"):
        moved_states(text, STATES)
