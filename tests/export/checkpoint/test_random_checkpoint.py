"""The random checkpoint is one that transformers loads too, and its tokenizer works as the official one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from flashnext.export.checkpoint import Checkpoint, random_tokenizer
from flashnext.export.checkpoint.random_checkpoint import main, write_random_checkpoint
from flashnext.export.checkpoint.random_quantized import QUANTIZATIONS
from flashnext.export.errors import ConfigError

PROMPT = torch.tensor([[300, 301, 496, 302, 303, 304, 305]])


def loaded(model_class: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    transformers.logging.set_verbosity_error()
    return model_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)


def test_transformers_loads_every_layout_to_the_same_model(random_checkpoint: Path, tmp_path: Path) -> None:
    logits = []
    split = write_random_checkpoint(tmp_path, experts="per_expert", prefix="model.", shards=3)
    for folder, model_class in (
        (random_checkpoint, theirs.Qwen4ExpForCausalLM),
        (random_checkpoint, theirs.Qwen4ExpForConditionalGeneration),
        (split, theirs.Qwen4ExpForCausalLM),
    ):
        model, info = loaded(model_class, folder)
        assert not [k for k in info["missing_keys"] if ".visual." not in k]
        assert not info["unexpected_keys"]
        with torch.no_grad():
            logits.append(model(PROMPT).logits)
    assert logits[0].std() > 1
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_values_depend_on_the_seed_only(random_checkpoint: Path, tmp_path: Path) -> None:
    first = Checkpoint.open(random_checkpoint).array("lm_head.weight")
    again = Checkpoint.open(write_random_checkpoint(tmp_path / "a", tokenizer=False)).array("lm_head.weight")
    other = Checkpoint.open(write_random_checkpoint(tmp_path / "b", seed=1, tokenizer=False)).array("lm_head.weight")
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    "changes",
    [
        {"ple_layer_ids": [], "hc_count": 2},
        {"ple_layer_ids": [1, 3], "ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 48, "split_ngram_parts": 3},
        {"tie_word_embeddings": True, "split_ngram_parts": 1, "num_hidden_layers": 2, "num_experts": 1},
    ],
)
def test_other_configurations(tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes.get("num_experts") == 1:
        changes = {**changes, "num_experts_per_tok": 1}
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path, changes))
    again = write_random_checkpoint(tmp_path / "again", checkpoint.config, tokenizer=False)
    assert Checkpoint.open(again).config == checkpoint.config


def test_tokenizer(random_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(random_checkpoint / "tokenizer.json"))
    text = "The weights, in 2003:\n\n  naïve 漢字 🙂 <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[-1] == random_tokenizer.IM_END
    assert len(tokenizer.encode("the memory of the model").ids) < 16
    assert tokenizer.token_to_id("<|endoftext|>") == random_tokenizer.END_OF_TEXT
    assert tokenizer.get_vocab_size() == random_tokenizer.SMALLEST_VOCABULARY


def test_chat_template_in_transformers(random_checkpoint: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(random_checkpoint)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == random_tokenizer.IM_END


def test_vocabulary_too_small_for_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer=False"):
        write_random_checkpoint(tmp_path / "x", {"vocab_size": 100, "eos_token_id": 3})
    assert not (tmp_path / "x").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "made"), "--experts", "per_expert", "--no-mtp", "--seed", "3", "--dtype", "float32"])
    assert str(tmp_path / "made") in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "made").expert_layout == "per_expert"


@pytest.mark.parametrize("quantization", sorted(QUANTIZATIONS))
def test_every_quantization_of_the_default_model_opens(tmp_path: Path, quantization: str) -> None:
    config = Checkpoint.open(write_random_checkpoint(tmp_path / "made", quantization=quantization)).config
    assert config.num_hidden_layers == 8


def test_number_of_layers(tmp_path: Path) -> None:
    main([str(tmp_path / "deep"), "--layers", "12", "--no-mtp"])
    assert Checkpoint.open(tmp_path / "deep").config.num_hidden_layers == 12


def test_what_cannot_be_a_model_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none"), "--layers", "0"])
    assert ended.value.code == 2
    assert "num_hidden_layers = 0 is outside" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
