"""The reader on sound checkpoints: every layout that users have opens to the same tensors."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint


def test_default_checkpoint_opens(random_checkpoint: Path) -> None:
    notes: list[str] = []
    checkpoint = Checkpoint.open(random_checkpoint, notes.append)
    assert notes == []
    assert checkpoint.config.has_mtp
    assert checkpoint.expert_layout == "fused"
    assert checkpoint.common_parent == random_checkpoint.resolve()
    array = checkpoint.array("embed_tokens.weight")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.shape == (512, 64)
    assert not array.flags.writeable


def test_layouts_hold_the_same_values(random_checkpoint: Path, tmp_path: Path) -> None:
    fused = Checkpoint.open(random_checkpoint)
    split = Checkpoint.open(
        write_random_checkpoint(tmp_path, experts="per_expert", prefix="model.", shards=5, vision=True)
    )
    assert split.expert_layout == "per_expert"
    for name in fused.tensors.keys() & split.tensors.keys():
        np.testing.assert_array_equal(fused.array(name), split.array(name), err_msg=name)
    for layer in ("layers.3", "mtp.layers.0"):
        (gate_up,), (down,) = fused.expert_sources(layer)
        (gate, up), (down_each,) = split.expert_sources(layer)
        for e in range(fused.config.num_experts):
            parts = [split.array(n.format(e=e)) for n in (gate, up)]
            np.testing.assert_array_equal(fused.array(gate_up)[e], np.concatenate(parts))
            np.testing.assert_array_equal(fused.array(down)[e], split.array(down_each.format(e=e)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, dtype=dtype, shards=1))
    assert checkpoint.array("lm_head.weight").dtype == np.dtype(dtype)
