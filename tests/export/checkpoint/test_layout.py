"""The list of expected tensors and the n-gram constants, against transformers' own model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from flashnext.export.checkpoint import ngram_constants
from flashnext.export.checkpoint.forms import Forms
from flashnext.export.checkpoint.layout import expected_tensors
from flashnext.export.checkpoint.random_config import full_config
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CheckpointError

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"ple_layer_ids": []},
    {"ple_layer_ids": [1, 3], "ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 48, "ple_conv_kernel_size": 3},
    {"hc_count": 2, "hc_lowrank": 5, "linear_conv_kernel_dim": 3, "num_hidden_layers": 3, "num_key_value_heads": 1},
    {"tie_word_embeddings": True, "linear_value_head_dim": 24, "indexer_n_heads": 1, "moe_intermediate_size": 40},
)


@pytest.mark.parametrize("changes", VARIANTS)
def test_names_and_shapes_are_those_of_transformers(changes: dict[str, Any]) -> None:
    raw = full_config(changes)
    with torch.device("meta"):
        model = theirs.Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**raw["text_config"]))
    state = {k.removeprefix("model."): tuple(v.shape) for k, v in model.state_dict().items()}
    config = ModelConfig.from_dict(raw)
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    expected = {n: e.shape for n, e in expected_tensors(config).items() if not n.startswith("mtp.")}
    assert expected.keys() == state.keys()
    for name, shape in expected.items():
        if name.endswith("ngram_embedding.weight"):
            rows = ngram_constants.derive(config, int(name.split(".")[1])).rows
            shape = (rows, *shape[1:])
        assert shape == state[name], name


def test_full_size_in_separate_tensors_is_listed_quickly() -> None:
    official = {"num_hidden_layers": 48, "num_experts": 512, "num_experts_per_tok": 10}
    config = ModelConfig.from_dict(full_config(official))
    present = [f"layers.{i}.mlp.experts.{e}.gate_proj.weight" for i in range(48) for e in range(512)]
    begin = time.perf_counter()
    expected = expected_tensors(config, Forms.of(dict.fromkeys(present, "BF16")))
    assert len(expected) > 48 * 512 * 3
    assert time.perf_counter() - begin < 5


def test_more_tensors_than_any_checkpoint_has_are_not_listed() -> None:
    config = ModelConfig.from_dict(full_config({"num_hidden_layers": 1024, "num_experts": 1 << 14}))
    forms = Forms(per_expert=frozenset(f"layers.{i}" for i in range(1024)))
    with pytest.raises(CheckpointError, match="1,048,576 tensors or more"):
        expected_tensors(config, forms)


@settings(max_examples=20, deadline=None)
@given(
    vocab=st.integers(2, 1 << 24), size=st.integers(2, 6), number=st.integers(0, 3), seed=st.integers(0, (1 << 62) - 1)
)
def test_multipliers(vocab: int, size: int, number: int, seed: int) -> None:
    expected = theirs._build_layer_multipliers(vocab, size, number, seed).tolist()
    assert list(ngram_constants.multipliers(vocab, size, number, seed)) == expected


@pytest.mark.parametrize(("base", "layers"), [(2, [1]), (500, [1, 2, 3]), (20_000_000, [2])])
def test_sizes_offsets_and_rows(base: int, layers: list[int]) -> None:
    raw = full_config({"ngram_vocab_size_base": base, "ple_layer_ids": layers})
    config = ModelConfig.from_dict(raw)
    their_config = Qwen4ExpTextConfig(**raw["text_config"])
    for number, layer in enumerate(config.ngram_layers):
        with torch.device("meta"):
            module = theirs.Qwen4ExpTextNGramEmbedding(their_config, config.ple_embed_dim, layer, number)
        constants = ngram_constants.derive(config, layer)
        assert list(constants.head_sizes) == module.head_vocab_sizes
        assert list(constants.head_offsets) == module.head_offsets
        assert constants.rows == module.ngram_embedding.num_embeddings


def test_official_table_has_the_published_rows() -> None:
    config = ModelConfig.from_dict(full_config({"ngram_vocab_size_base": 20_000_000}))
    assert ngram_constants.derive(config, 1).rows == 320_001_536


def test_primes_agree_with_trial_division() -> None:
    def slow(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    numbers = [*range(2000), 3215031751, 3825123056546413051, (1 << 61) - 1]
    expected = [*map(slow, range(2000)), False, False, True]  # two strong pseudoprimes to small bases, one prime
    assert [ngram_constants.is_prime(n) for n in numbers] == expected
