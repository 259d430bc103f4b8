"""Weights from a checkpoint: mapped when the bytes allow it, otherwise made once, and equal to the tensors."""

from __future__ import annotations

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
