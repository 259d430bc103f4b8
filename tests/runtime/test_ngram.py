"""N-gram ids against the transformers module, and the gather from sharded tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.ngram import HostRows, ids
from flashnext.runtime.ngram_table import NgramTable

EOS = 7
VOCAB = 40


def reference_module(ngram_size: int, heads: int, layer: int = 0) -> Any:
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = Qwen4ExpTextConfig(
        vocab_size=VOCAB,
        ngram_size=ngram_size,
        heads_per_ngram=heads,
        ngram_vocab_size_base=101,
        make_ngram_vocab_size_divisible_by=8,
        eos_token_id=[EOS, 3],
    )
    module = Qwen4ExpTextNGramEmbedding(config, (ngram_size - 1) * heads * 2, 1, layer)
    torch.nn.init.normal_(module.ngram_embedding.weight)
    return module


def spec_of(module: Any) -> NgramSpec:
    rows, columns = module.ngram_embedding.weight.shape
    return NgramSpec(
        layer=1,
        input="ngram_rows.1",
        multipliers=tuple(module.layer_multipliers.tolist()),
        head_sizes=tuple(module.head_vocab_sizes),
        head_offsets=tuple(module.head_offsets),
        heads_per_ngram=module.heads_per_ngram,
        eos=EOS,
        columns=columns,
        rows=rows,
        shards=("shard_0", "shard_1", "shard_2"),
    )


def open_rows(module: Any, dtype: str = "float32") -> HostRows:
    """The module's table in three shards of different length."""
    table = module.ngram_embedding.weight.detach().numpy()
    spec = spec_of(module)
    return HostRows(spec, NgramTable(spec, np.split(table, [5, len(table) // 2]), dtype), dtype)


@pytest.mark.parametrize(("ngram_size", "heads", "layer"), [(2, 1, 0), (3, 4, 0), (3, 8, 1), (4, 2, 2)])
def test_rows_equal_transformers_in_one_shot_and_in_chunks(ngram_size: int, heads: int, layer: int) -> None:
    module = reference_module(ngram_size, heads, layer)
    rows = open_rows(module)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (3, 500))
    tokens[rng.random(tokens.shape) < 0.15] = EOS
    expected = module(torch.from_numpy(tokens), None).detach().numpy()
    padded = np.concatenate([np.full((3, ngram_size - 1), EOS), tokens], axis=1)
    start = 0
    for length in [1, 1, 2, 3, 64, 1, 200, 228]:
        context = padded[:, start : start + ngram_size - 1]
        got = rows.submit(tokens[:, start : start + length], context, np.full(3, length)).wait()
        np.testing.assert_array_equal(got, expected[:, start : start + length])
        start += length
    assert start == tokens.shape[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(2, 4))
def test_eos_hides_what_came_before_it(text: list[int], ngram_size: int) -> None:
    module = reference_module(ngram_size, 2)
    tokens = np.array([text])
    expected = module(torch.from_numpy(tokens), None).detach().numpy()
    got = open_rows(module).rows(tokens, np.full((1, ngram_size - 1), EOS), np.array([len(text)]))
    np.testing.assert_array_equal(got, expected)


def test_products_wrap_in_int64_and_rows_are_never_negative() -> None:
    spec = NgramSpec(1, "x", (2**62 + 1, 2**63 - 1), (11, 13), (0, 11), 2, EOS, 2, 24, ("s",))
    got = ids(spec, np.array([[30, 5]]), np.array([[EOS]]))

    def wrap(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    for s, (now, before) in enumerate([(30, EOS), (5, 30)]):
        mixed = wrap(now * spec.multipliers[0]) ^ wrap(before * spec.multipliers[1])
        assert got[0, s].tolist() == [mixed % 11, mixed % 13 + 11]


def test_rows_without_a_token_are_zero_and_dtype_is_the_graphs() -> None:
    module = reference_module(3, 4)
    rows = open_rows(module, "bfloat16")
    tokens = np.full((2, 3), 5, np.int32)
    got = rows.rows(tokens, np.full((2, 2), EOS), np.array([2, 0]))
    assert got.dtype == ml_dtypes.bfloat16
    assert got[0, :2].astype(np.float32).any(axis=-1).all()
    assert not got[0, 2].any()
    assert not got[1].any()


def test_a_table_that_needs_a_scale_or_is_too_short_is_refused() -> None:
    spec = NgramSpec(1, "x", (3, 5), (11, 13), (0, 11), 2, EOS, 2, 24, ("s",))
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        NgramTable(spec, [np.zeros((24, 2), ml_dtypes.float8_e4m3fn)], "float32")
    with pytest.raises(CheckpointError, match="20 rows, 24"):
        NgramTable(spec, [np.zeros((20, 2), np.float32)], "float32")


def test_the_table_is_read_from_the_mapped_files(random_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(random_checkpoint)
    spec = checkpoint.ngram_spec(1)
    rows = HostRows.open(spec, checkpoint, "float32")
    assert all(np.shares_memory(s, checkpoint.array(n)) for s, n in zip(rows.table.shards, spec.shards, strict=True))
    table = np.concatenate([checkpoint.array(n) for n in spec.shards]).astype(np.float32)
    chosen = np.random.default_rng(0).integers(0, spec.rows, 500)
    np.testing.assert_array_equal(rows.table.gather(chosen), table[chosen])
    rows.close()
