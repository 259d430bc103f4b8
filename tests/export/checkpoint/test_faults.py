"""The reader on wrong checkpoints: one error that names every fault and says what was expected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.shards import INDEX_NAME
from flashnext.export.errors import CheckpointError, ConfigError, FlashNextError

TABLE = "model.layers.1.ple.ple_embedding"


def message(folder: Path, kind: type[FlashNextError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_all_kinds_of_wrong_tensors_are_listed_at_once(checkpoint_folder: Path, edit: Callable[..., None]) -> None:
    edit(
        checkpoint_folder,
        {
            "model.layers.2.linear_attn.A_log": None,
            "mtp.fc_hidden.weight": None,
            "model.layers.0.self_attn.q_proj.weight": np.zeros((3, 4), np.float32),
            "lm_head.weight": np.zeros((511, 64), np.float32),
            "model.embed_tokens.weight": np.zeros((512, 64), np.int64),
        },
    )
    text = message(checkpoint_folder)
    assert "(5 faults)" in text
    assert "missing: layers.2.linear_attn.A_log, expected [6] BF16, F16 or F32" in text
    assert "missing: mtp.fc_hidden.weight, expected [64, 64]" in text
    assert "surplus: model.layers.0.self_attn.q_proj.weight, [3, 4] F32" in text
    assert "wrong shape: lm_head.weight is [511, 64], expected [512, 64]" in text
    assert "wrong dtype: embed_tokens.weight is I64, expected BF16, F16 or F32" in text


def test_long_lists_are_cut_with_a_count(checkpoint_folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update(num_hidden_layers=12))
    text = message(checkpoint_folder)
    assert "  … and " in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize("index", [0, 2, 3])
def test_missing_ngram_shard(checkpoint_folder: Path, edit: Callable[..., None], index: int) -> None:
    edit(checkpoint_folder, {f"{TABLE}.ngram_embedding.shard_{index}.weight": None})
    text = message(checkpoint_folder)
    assert f"shard_{index}.weight" in text if index < 3 else "have 6816 rows, expected 9088" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_multipliers", [3, 0, 5]),
        ("ngram_heads_vocab_sizes", [-503, *[500] * 15]),
        ("ngram_heads_offsets", [-1, *[0] * 15]),
        ("ngram_heads_offsets", [1 << 40] * 16),
    ],
)
def test_ngram_constants_that_do_not_fit(
    checkpoint_folder: Path, edit: Callable[..., None], name: str, value: list[int]
) -> None:
    edit(checkpoint_folder, {f"{TABLE}.{name}": np.array(value, np.int64)})
    assert "layers.1.ple.ple_embedding" in message(checkpoint_folder)


def test_ngram_constants_in_part(checkpoint_folder: Path, edit: Callable[..., None]) -> None:
    edit(checkpoint_folder, {f"{TABLE}.layer_multipliers": None})
    assert "but not layer_multipliers; expected all or none" in message(checkpoint_folder)


def test_one_tensor_under_both_prefixes(checkpoint_folder: Path, edit: Callable[..., None]) -> None:
    edit(checkpoint_folder, {"model.language_model.embed_tokens.weight": np.zeros((512, 64), np.float32)})
    assert "embed_tokens.weight twice" in message(checkpoint_folder)


# --- configuration ------------------------------


def test_unknown_model_type(checkpoint_folder: Path, edit_json: Callable[..., None]) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c.update(model_type="llama"))
    assert "model_type is 'llama'" in message(checkpoint_folder, ConfigError)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", -1), ("num_experts", 10**12), ("vocab_size", "many"), ("indexer_budget", 33), ("seed", True)],
)
def test_absurd_values(checkpoint_folder: Path, edit_json: Callable[..., None], field: str, value: Any) -> None:
    edit_json(checkpoint_folder / "config.json", lambda c: c["text_config"].update({field: value}))
    assert field in message(checkpoint_folder, ConfigError)


# --- files ------------------------------


def test_no_folder_no_configuration_no_weights(tmp_path: Path, checkpoint_folder: Path) -> None:
    assert "is not a folder" in message(tmp_path / "nowhere")
    (checkpoint_folder / "model.safetensors").rename(checkpoint_folder / "model-00001-of-00001.safetensors")
    assert f"no {INDEX_NAME}" in message(checkpoint_folder)
    (checkpoint_folder / "model-00001-of-00001.safetensors").unlink()
    assert "has no weights" in message(checkpoint_folder)
    (checkpoint_folder / "config.json").unlink()
    assert "config.json does not exist" in message(checkpoint_folder, ConfigError)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.pt"])
def test_pickle_is_never_opened(checkpoint_folder: Path, name: str) -> None:
    (checkpoint_folder / "model.safetensors").rename(checkpoint_folder / name)
    text = message(checkpoint_folder)
    assert "only as pickle files" in text
    assert name in text


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", "", 5, ".safetensors", "a\0b"]
)
def test_index_that_leads_elsewhere(sharded_folder: Path, edit_json: Callable[..., None], file: Any) -> None:
    edit_json(sharded_folder / INDEX_NAME, lambda i: i["weight_map"].update({"lm_head.weight": file}))
    text = message(sharded_folder)
    assert "lm_head.weight" in text
    assert "only .safetensors files beside the index are read" in text


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_index_that_is_none(sharded_folder: Path, content: str) -> None:
    (sharded_folder / INDEX_NAME).write_text(content)
    assert INDEX_NAME in message(sharded_folder)


def test_index_and_shards_disagree(sharded_folder: Path, edit_json: Callable[..., None]) -> None:
    def change(index: dict[str, Any]) -> None:
        files = index["weight_map"]
        del files["mtp.fc_hidden.weight"]
        files["model.language_model.no_such"] = files["lm_head.weight"]

    edit_json(sharded_folder / INDEX_NAME, change)
    text = message(sharded_folder)
    assert f"mtp.fc_hidden.weight is in model-00002-of-00002.safetensors but not in {INDEX_NAME}" in text
    assert "model.language_model.no_such is not in model-0000" in text


def test_shard_is_missing(sharded_folder: Path) -> None:
    (sharded_folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors cannot be read" in message(sharded_folder)


def test_every_damaged_shard_is_named(sharded_folder: Path) -> None:
    for file in sharded_folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    text = message(sharded_folder)
    assert "(2 faults)" in text
    assert text.count("(truncated)") == 2


def test_same_tensor_in_two_shards(sharded_folder: Path, edit_json: Callable[..., None]) -> None:
    copy = sharded_folder / "model-00003-of-00002.safetensors"
    copy.write_bytes((sharded_folder / "model-00002-of-00002.safetensors").read_bytes())
    edit_json(sharded_folder / INDEX_NAME, lambda i: i["weight_map"].update({"lm_head.weight": copy.name}))
    assert f"and again in {copy.name}" in message(sharded_folder)


def test_duplicate_key_in_the_index(sharded_folder: Path) -> None:
    index = sharded_folder / INDEX_NAME
    entry = json.dumps({"weight_map": {}})[1:-1]
    index.write_text(index.read_text().replace("{", "{" + entry + ",", 1))
    assert "duplicate key 'weight_map'" in message(sharded_folder)
