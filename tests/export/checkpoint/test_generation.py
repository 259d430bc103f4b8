"""What ends a text, and sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashnext.export.checkpoint import generation_settings
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CheckpointError

CONFIG = ModelConfig.from_dict(full_config({"eos_token_id": [7, 8]}))
TOKENIZER = {"added_tokens": [{"id": 498, "content": "<|im_end|>"}], "model": {"vocab": {"</s>": 2}}}


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def test_random_checkpoint_ends_turns_otherwise_than_documents(random_checkpoint: Path) -> None:
    config = ModelConfig.from_folder(random_checkpoint)
    stops, sampling = generation_settings(random_checkpoint, config)
    assert stops == (496, 498)
    assert config.ngram_eos == 496
    assert sampling == {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95}


def test_no_files(tmp_path: Path) -> None:
    assert generation_settings(tmp_path, CONFIG) == ((7, 8), {})


@pytest.mark.parametrize(("eos", "stops"), [(3, (3,)), ([5, 3], (3, 5)), (None, (7, 8)), ([], (7, 8))])
def test_generation_config_comes_before_the_models(tmp_path: Path, eos: Any, stops: tuple[int, ...]) -> None:
    assert generation_settings(write(tmp_path, generation_config={"eos_token_id": eos}), CONFIG)[0] == stops


@pytest.mark.parametrize(
    ("token", "stops"),
    [("<|im_end|>", (3, 498)), ({"content": "<|im_end|>"}, (3, 498)), ("</s>", (2, 3)), (None, (3,)), (5, (3,))],
)
def test_the_tokenizers_own_eos_is_added(tmp_path: Path, token: Any, stops: tuple[int, ...]) -> None:
    write(tmp_path, generation_config={"eos_token_id": 3}, tokenizer_config={"eos_token": token}, tokenizer=TOKENIZER)
    assert generation_settings(tmp_path, CONFIG)[0] == stops


def test_eos_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "<end>"}, tokenizer=TOKENIZER)
    with pytest.raises(CheckpointError, match="eos_token '<end>'"):
        generation_settings(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eos_token_id", 512),
        ("eos_token_id", [-1]),
        ("eos_token_id", "x"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("do_sample", "yes"),
        ("repetition_penalty", 0),
    ],
)
def test_values_that_cannot_be_meant(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path, generation_config={field: value})
    with pytest.raises(CheckpointError, match=field):
        generation_settings(tmp_path, CONFIG)


def test_whole_numbers_become_the_right_type(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"temperature": 1, "top_k": 20.0, "do_sample": False, "top_p": None})
    sampling = generation_settings(tmp_path, CONFIG)[1]
    assert sampling == {"temperature": 1.0, "top_k": 20, "do_sample": False}
    assert isinstance(sampling["temperature"], float)
    assert isinstance(sampling["top_k"], int)
