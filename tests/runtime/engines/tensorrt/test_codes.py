"""8-bit codes on the device: experts, keys and values, and a residual in FP8, which plans have as another dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_folder import CHUNK, Machine, write_engine

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import TensorSpec
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.engines.tensorrt.arrays import DeviceArray, Joined
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.shapes import plan_form
from flashnext.runtime.hand_over import DeviceBranches, HandOver, join

PROMPTS = [list(range(40, 110)), [1, 2, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensorrt", "tensorrt-rtx"])
def test_the_tokens_of_an_fp8_model_are_those_of_onnxruntime(kind: str, tmp_path: Path, machine: Machine) -> None:
    """Experts of the official FP8 format, caches in FP8, and a residual whose scales travel with the branches; drafts
    take branches from the body and from the draft layer."""
    write_random_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 4}, quantization="fp8")
    bundle = tmp_path / "bundle"
    options = ExportOptions(window=4, capacity=128, slots=2, residual_form="fp8-dynamic", kv_cache_dtype="fp8")
    export_bundle(tmp_path / "checkpoint", bundle, options)
    write_engine(bundle, kind, sequences=2)
    machine(7)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, draft_tokens=2)
    with LLM(bundle, engine=kind) as llm, LLM(bundle, threads=1, prefill_chunk=CHUNK) as reference:
        found, wanted = (x.generate(PROMPTS, params) for x in (llm, reference))
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert [o.drafts for o in found] == [o.drafts for o in wanted]


def test_the_form_of_codes_in_a_plan() -> None:
    state = TensorSpec("layers.3.key_state", "uint8", (3, 65, 2, 256), "state")
    assert plan_form(state, {}) == ("uint8", (3, 65, 2, 256))
    assert plan_form(state, {state.name: "float8_e4m3fn"}) == ("float8_e4m3fn", (3, 65, 2, 256))
    assert plan_form(state, {state.name: "int32"}) == ("int32", (3, 65, 2, 64))
    assert plan_form(TensorSpec("x", "uint8", ("B", "S", 8), "step"), {"x": "int32"}) == ("int32", ("B", "S", 2))


@pytest.mark.parametrize("static", [False, True])
def test_branches_on_the_device_travel_with_their_scales(make_manifest, static: bool) -> None:  # type: ignore[no-untyped-def]
    """Never packed, never on the host; static scales are numbers that the host knows."""
    from flashnext.export.residual_scales import last_store

    store = last_store(make_manifest().config)
    scales = {store: (0.5, 1.0, 2.0, 4.0), "mtp.layers.0.mlp": (8.0,) * 4} if static else {}
    manifest = make_manifest(
        residual_mode="static" if static else "dynamic", residual_dtype="float8_e4m3fn", residual_scales=scales
    )
    device = HostDevice()
    stream = device.new_stream()
    codes = np.arange(2 * 3 * 4 * 8, dtype=np.uint8).reshape(2, 3, 4, 8)
    dynamic = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)

    def on_device(values: np.ndarray) -> DeviceArray:  # type: ignore[type-arg]
        array = DeviceArray(device, stream, device.allocate(values.nbytes).address, values.shape, values.dtype)
        array[:] = values
        return array

    outputs = {"hidden": on_device(codes), **({} if static else {"hidden_token_scale": on_device(dynamic)})}
    hand_over = HandOver(manifest)
    rows = hand_over.packed("hidden", outputs)
    assert isinstance(rows, DeviceBranches)
    fed = hand_over.fed(join([rows[1, :2], rows[0, :3]], 3))
    assert isinstance(fed["hidden"], Joined)
    assert fed["hidden"].shape == (2, 3, 4, 8)
    assert [row.copy().tolist() for row in fed["hidden"].rows] == [codes[1, :2].tolist(), codes[0].tolist()]
    if static:
        np.testing.assert_array_equal(fed["hidden_token_scale"][1], np.tile((0.5, 1.0, 2.0, 4.0), (3, 1)))
    else:
        found = [row.copy().tolist() for row in fed["hidden_token_scale"].rows]
        assert found == [dynamic[1, :2].tolist(), dynamic[0].tolist()]
