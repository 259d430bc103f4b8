"""Weights from a checkpoint: mapped when the bytes allow it, otherwise made once, and equal to the tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import WeightSpec
from flashnext.runtime.weights import load_weight


@pytest.fixture(scope="module")
def fused(random_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(random_checkpoint)


@pytest.fixture(scope="module")
def per_expert(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same weights as the fused checkpoint, one tensor per expert."""
    return Checkpoint.open(write_random_checkpoint(tmp_path_factory.mktemp("per_expert"), experts="per_expert"))


def expert_specs(checkpoint: Checkpoint, dtype: str) -> tuple[WeightSpec, WeightSpec]:
    c = checkpoint.config
    gate_up, down = checkpoint.expert_sources("layers.1")
    e, i, h = c.num_experts, c.moe_intermediate_size, c.hidden_size
    return WeightSpec("gate_up", dtype, (e, 2, i, h), gate_up), WeightSpec("down", dtype, (e, h, i), down)


def test_a_tensor_of_the_graphs_dtype_is_mapped_not_copied(fused: Checkpoint) -> None:
    for spec in expert_specs(fused, "bfloat16"):
        weight = load_weight(spec, fused)
        assert weight.shape == spec.shape
        assert not weight.flags.owndata
        assert not weight.flags.writeable
        assert np.shares_memory(weight, fused.array(spec.sources[0]))


def test_another_dtype_is_converted_once(fused: Checkpoint) -> None:
    for spec in expert_specs(fused, "float32"):
        weight = load_weight(spec, fused)
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, fused.array(spec.sources[0]).astype(np.float32).reshape(spec.shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_are_stacked_gate_before_up(per_expert: Checkpoint, dtype: str) -> None:
    gate_up, down = (load_weight(spec, per_expert) for spec in expert_specs(per_expert, dtype))
    assert gate_up.dtype.name == down.dtype.name == dtype
    for e in range(per_expert.config.num_experts):
        at = f"layers.1.mlp.experts.{e}"
        for part, name in ((gate_up[e, 0], "gate_proj"), (gate_up[e, 1], "up_proj"), (down[e], "down_proj")):
            tensor = per_expert.array(f"{at}.{name}.weight")
            np.testing.assert_array_equal(part.astype(np.float32), tensor.astype(np.float32))


def test_fused_and_per_expert_give_the_same_weights(fused: Checkpoint, per_expert: Checkpoint) -> None:
    for ours, theirs in zip(expert_specs(fused, "bfloat16"), expert_specs(per_expert, "bfloat16"), strict=True):
        assert load_weight(ours, fused).tobytes() == load_weight(theirs, per_expert).tobytes()


def test_missing_and_misshapen_sources_are_named(fused: Checkpoint, per_expert: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"lacks nothing\.weight, from which w is made"):
        load_weight(WeightSpec("w", "float32", (3,), ("nothing.weight",)), fused)
    with pytest.raises(CheckpointError, match=r"does not hold the 3 elements of w"):
        load_weight(WeightSpec("w", "float32", (3,), ("embed_tokens.weight",)), fused)
    down = expert_specs(per_expert, "float32")[1]
    more = WeightSpec("w", "float32", (down.shape[0] + 1, *down.shape[1:]), down.sources)
    with pytest.raises(CheckpointError, match=rf"lacks .*experts\.{down.shape[0]}\."):
        load_weight(more, per_expert)


def test_memory_is_taken_after_the_sources_are_checked(per_expert: Checkpoint) -> None:
    down = expert_specs(per_expert, "float32")[1]
    with pytest.raises(CheckpointError, match="does not hold"):
        load_weight(WeightSpec("w", "float32", (*down.shape[:2], 1 << 50), down.sources), per_expert)
    with pytest.raises(CheckpointError, match="cannot be made of 2 tensors of equal size"):
        load_weight(WeightSpec("w", "float32", (3,), ("a", "b")), per_expert)


# --- codes and scales ----------------------------


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """NVFP4 experts, with one layer in block FP8."""
    folder = tmp_path_factory.mktemp("quantized")
    sizes = {"num_hidden_layers": 4, "ple_embed_dim": 256}
    return Checkpoint.open(write_random_checkpoint(folder, sizes, quantization="mixed", tokenizer=False))


def scale_spec(checkpoint: Checkpoint, layer: str, port: str, dtype: str, *shape: int) -> WeightSpec:
    return WeightSpec(port, dtype, shape, checkpoint.expert_scales(layer)[port], is_scale=True)


def test_codes_keep_their_bits_and_scales_their_values(quantized: Checkpoint) -> None:
    c = quantized.config
    e, i, h = c.num_experts, c.moe_intermediate_size, c.hidden_size
    fp8 = load_weight(WeightSpec("down", "uint8", (e, h, i), quantized.expert_sources("layers.2")[1]), quantized)
    assert fp8[5].tobytes() == quantized.array("layers.2.mlp.experts.5.down_proj.weight").tobytes()
    blocks = load_weight(scale_spec(quantized, "layers.2", "gate_up_scale", "float32", e, 2, 1, 1), quantized)
    assert blocks[5, 1] == quantized.array("layers.2.mlp.experts.5.up_proj.weight_scale_inv").astype(np.float32)
    groups = load_weight(scale_spec(quantized, "layers.1", "down_scale", "uint8", e, h, i // 16), quantized)
    assert groups[5].tobytes() == quantized.array("layers.1.mlp.experts.5.down_proj.weight_scale").tobytes()
    for port, shape in (("gate_up_scale_2", (e, 2)), ("down_scale_2", (e,))):
        values = load_weight(scale_spec(quantized, "layers.1", port, "float32", *shape), quantized)
        name = "down_proj" if port == "down_scale_2" else "gate_proj"
        assert values[5].flat[0] == quantized.array(f"layers.1.mlp.experts.5.{name}.weight_scale_2")


def test_fused_codes_are_mapped(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 128, "num_hidden_layers": 4}
    folder = write_random_checkpoint(tmp_path, sizes, quantization="fp8", experts="fused", tokenizer=False)
    checkpoint = Checkpoint.open(folder)
    (source,), _ = checkpoint.expert_sources("layers.0")
    weight = load_weight(WeightSpec("w", "uint8", (8, 2, 128, 64), (source,)), checkpoint)
    assert not weight.flags.owndata
    assert np.shares_memory(weight, checkpoint.array(source))


@pytest.mark.parametrize(
    ("layer", "port", "shape", "value"),
    [
        ("layers.2", "gate_up_scale", (8, 2, 1, 1), 0.0),
        ("layers.2", "gate_up_scale", (8, 2, 1, 1), -1.0),
        ("layers.1", "gate_up_scale_2", (8, 2), float("nan")),
        ("layers.1", "gate_up_scale_2", (8, 2), float("inf")),
        ("layers.1", "gate_up_scale", (8, 2, 32, 4), float("nan")),
        ("layers.1", "gate_up_scale", (8, 2, 32, 4), -2.0),
        ("layers.1", "gate_up_scale", (8, 2, 32, 4), 0.0),
    ],
)
def test_a_bad_scale_is_named(
    quantized: Checkpoint, tmp_path: Path, layer: str, port: str, shape: tuple[int, ...], value: float
) -> None:
    spec = scale_spec(quantized, layer, port, "uint8" if shape[-1] == 4 else "float32", *shape)
    checkpoint = Checkpoint.open(shutil.copytree(quantized.folder, tmp_path / "spoilt"))
    bad = spec.sources[1].replace("{e}", "6")
    info, spoilt = checkpoint.tensors[bad], quantized.array(bad).copy()
    spoilt.reshape(-1)[-1] = value
    with info.file.open("r+b") as stream:
        stream.seek(info.offset)
        stream.write(spoilt.tobytes())
    with pytest.raises(CheckpointError, match=rf"{bad} holds the scale -?{abs(value)}; scales have to be finite"):
        load_weight(spec, checkpoint)
