"""The n-gram table of a layer as it lies in a checkpoint: hash constants and shards, checked against each other.

A wrong constant does not crash, it reads other rows: the text stays fluent and is wrong. So every stored value is
checked against the table before anything uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashnext.export.checkpoint.forms import NVFP4, Forms, Table
from flashnext.export.checkpoint.ngram_constants import NgramConstants, derive, padded
from flashnext.export.checkpoint.safetensors_file import TensorInfo
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.manifest import NgramSpec

STORED = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")

Values = Callable[[str], tuple[int, ...]]
"""Reads a stored integer tensor."""


def ngram_spec(
    config: ModelConfig, layer: int, tensors: Mapping[str, TensorInfo], forms: Forms, values: Values
) -> tuple[NgramSpec, list[str]]:
    """How the host finds the rows of this layer, and what is wrong with it."""
    at = f"layers.{layer}.ple.ple_embedding"
    table = forms.table(layer)
    rows = sum(tensors[s].shape[0] for s in table.shards)
    constants, faults = _constants(config, layer, at, tensors, values)
    if not faults and rows != constants.rows:
        count = len(table.shards)
        faults.append(f"{at}.ngram_embedding: its {count} shard(s) have {rows} rows, expected {constants.rows}")
    if table.form == NVFP4:
        faults += _row_scale_faults(table, tensors)
    spec = NgramSpec(
        layer=layer,
        input=f"ngram_rows.{layer}",
        multipliers=constants.multipliers,
        head_sizes=constants.head_sizes,
        head_offsets=constants.head_offsets,
        heads_per_ngram=config.heads_per_ngram,
        eos=config.ngram_eos,
        columns=config.ple_embed_dim // config.ngram_heads,
        rows=rows,
        shards=table.shards,
        form=table.form,
        scale=table.scale,
        row_scales=table.row_scales,
    )
    return spec, faults


def _row_scale_faults(table: Table, tensors: Mapping[str, TensorInfo]) -> list[str]:
    pairs = [(tensors[codes], tensors[scales]) for codes, scales in zip(table.shards, table.row_scales, strict=True)]
    return [
        f"{scales.name} has {scales.shape[0]} rows, {codes.name} {codes.shape[0]}; expected as many"
        for codes, scales in pairs
        if codes.shape[0] != scales.shape[0]
    ]


def _constants(
    config: ModelConfig, layer: int, at: str, tensors: Mapping[str, TensorInfo], values: Values
) -> tuple[NgramConstants, list[str]]:
    stored = [name for name in STORED if f"{at}.{name}" in tensors]
    if not stored:
        return derive(config, layer), []
    if len(stored) < len(STORED):
        absent = ", ".join(sorted(set(STORED) - set(stored)))
        return derive(config, layer), [f"{at} stores {', '.join(stored)} but not {absent}; expected all or none"]
    factors, sizes, offsets = (values(f"{at}.{name}") for name in STORED)
    end = max(o + s for o, s in zip(offsets, sizes, strict=True))
    rows = padded(end, config.make_ngram_vocab_size_divisible_by)
    return NgramConstants(factors, sizes, offsets, rows), _value_faults(at, factors, sizes, offsets)


def _value_faults(at: str, factors: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> list[str]:
    checks = (
        (all(f > 0 for f in factors), "layer_multipliers", factors, "positive multipliers"),
        (all(s > 0 for s in sizes), "ngram_heads_vocab_sizes", sizes, "positive sizes"),
        (all(o >= 0 for o in offsets), "ngram_heads_offsets", offsets, "offsets inside the table"),
    )
    return [f"{at}.{name} holds {str(list(v))[:80]}, expected {what}" for ok, name, v, what in checks if not ok]
