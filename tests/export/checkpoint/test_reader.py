"""The reader on sound checkpoints: every layout that users have opens to the same tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint

TABLE = "model.layers.1.ple.ple_embedding"


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


def test_mtp_experts_may_be_stored_otherwise_than_the_models(
    checkpoint_folder: Path, edit: Callable[..., None]
) -> None:
    before = Checkpoint.open(checkpoint_folder)
    at = "mtp.layers.0.mlp.experts"
    gate_up, down = before.array(f"{at}.gate_up_proj"), before.array(f"{at}.down_proj")
    changes: dict[str, Any] = {f"{at}.gate_up_proj": None, f"{at}.down_proj": None}
    for e in range(8):
        gate, up = np.split(gate_up[e], 2)
        changes |= {f"{at}.{e}.gate_proj.weight": gate, f"{at}.{e}.up_proj.weight": up}
        changes[f"{at}.{e}.down_proj.weight"] = down[e]
    edit(checkpoint_folder, changes)
    checkpoint = Checkpoint.open(checkpoint_folder)
    assert checkpoint.expert_layout == "fused"
    assert checkpoint.expert_sources("mtp.layers.0")[1] == (f"{at}.{{e}}.down_proj.weight",)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, dtype=dtype, shards=1, tokenizer=False))
    assert checkpoint.array("lm_head.weight").dtype == np.dtype(dtype)


@pytest.mark.parametrize("spelling", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_spellings_of_layer_types(checkpoint_folder: Path, edit_json: Callable[..., None], spelling: str) -> None:
    types = [spelling if i % 4 == 3 else "linear_attention" for i in range(8)]
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update(layer_types=types))
    assert Checkpoint.open(checkpoint_folder).config.layer_types[3] == "sparse_attention"


def test_first_of_several_eos_restarts_the_ngrams(checkpoint_folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update(eos_token_id=[7, 496]))
    checkpoint = Checkpoint.open(checkpoint_folder)
    assert checkpoint.config.eos_token_id == (7, 496)
    assert checkpoint.ngram_spec(1).eos == 7


def test_vision_tensors_are_skipped_with_one_line(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, vision=True, tokenizer=False), notes.append)
    assert notes == ["Skipped 2 vision tensors (model.visual.*): only the text model is used."]
    assert not any("visual" in name for name in checkpoint.tensors)


def test_checkpoint_without_mtp(tmp_path: Path) -> None:
    notes: list[str] = []
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, mtp=False, tokenizer=False), notes.append)
    assert not checkpoint.config.has_mtp
    assert len(notes) == 1
    assert "mtp.*" in notes[0]


def test_mtp_that_the_configuration_leaves_out(checkpoint_folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update(mtp_num_hidden_layers=0))
    notes: list[str] = []
    checkpoint = Checkpoint.open(checkpoint_folder, notes.append)
    assert not any(name.startswith("mtp.") for name in checkpoint.tensors)
    assert "mtp_num_hidden_layers = 0" in notes[0]


def test_tied_embedding(checkpoint_folder: Path, edit: Callable[..., None], edit_json: Callable[..., None]) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update(tie_word_embeddings=True))
    notes: list[str] = []
    assert "lm_head.weight" not in Checkpoint.open(checkpoint_folder, notes.append).tensors
    assert "tie_word_embeddings" in notes[0]
    edit(checkpoint_folder, {"lm_head.weight": None})
    assert "lm_head.weight" not in Checkpoint.open(checkpoint_folder).tensors


def test_ngram_table_in_one_tensor_and_without_constants(checkpoint_folder: Path, edit: Callable[..., None]) -> None:
    before = Checkpoint.open(checkpoint_folder)
    spec = before.ngram_spec(1)
    assert (spec.input, spec.rows, spec.columns) == ("ngram_rows.1", 9088, 4)
    assert [s.rsplit(".", 2)[1] for s in spec.shards] == ["shard_0", "shard_1", "shard_2", "shard_3"]
    whole = np.concatenate([before.array(s) for s in spec.shards])
    changes: dict[str, Any] = {before.tensors[s].raw_name: None for s in spec.shards}
    changes[f"{TABLE}.ngram_embedding.weight"] = whole
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        changes[f"{TABLE}.{name}"] = None
    edit(checkpoint_folder, changes)
    after = Checkpoint.open(checkpoint_folder).ngram_spec(1)
    assert after.shards == ("layers.1.ple.ple_embedding.ngram_embedding.weight",)
    assert (after.multipliers, after.head_sizes, after.head_offsets) == (
        spec.multipliers,
        spec.head_sizes,
        spec.head_offsets,
    )


def test_hub_cache_of_links(random_checkpoint: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(random_checkpoint.iterdir())):
        shutil.copy(file, blobs / f"{number:02d}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:02d}"))
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.common_parent == blobs.resolve()
    assert {t.file.parent for t in checkpoint.tensors.values()} == {blobs.resolve()}
    expected = Checkpoint.open(random_checkpoint).array("lm_head.weight")
    np.testing.assert_array_equal(checkpoint.array("lm_head.weight"), expected)
