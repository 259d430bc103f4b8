"""Where a random checkpoint's tensors go: names, dtypes and files, as the official conversions lay them out.

The values come from `random_weights` in canonical form (experts of a layer fused, an n-gram table whole); this module
cuts them into per-expert tensors and table shards, puts the prefix before the names and spreads all over the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashnext.export.checkpoint.layout import expected_tensors
from flashnext.export.checkpoint.ngram_constants import derive
from flashnext.export.checkpoint.random_weights import random_tensor
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, Values, write_safetensors
from flashnext.export.checkpoint.shards import INDEX_NAME
from flashnext.export.config import ModelConfig

Experts = Literal["fused", "per_expert"]
Array = np.ndarray[Any, Any]
WriteFile = Callable[[Path, Sequence[PlannedTensor], Values], None]

ALWAYS_FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""Kept in float32 beside a BF16 model, as training frameworks do for the decay and this norm."""


class WeightWriter:
    """Lays the canonical tensors (experts fused, n-gram tables whole) out as the checkpoint stores them."""

    def __init__(
        self, config: ModelConfig, seed: int, dtype: str, scale: float, experts: Experts, prefix: str, vision: bool
    ) -> None:
        self.config, self.dtype, self.experts, self.prefix = config, dtype, experts, prefix
        self.plan: dict[str, PlannedTensor] = {}
        self.sources: dict[str, tuple[str, tuple[Any, ...]]] = {}
        """Raw name of each stored tensor: which canonical tensor, and the part of it."""
        self.shapes: dict[str, tuple[int, ...]] = {}

        def canonical(name: str) -> Array:
            return _canonical(name, self.shapes[name], config, seed, scale)

        # A layer's experts and a table's shards follow each other, so two whole tensors are enough to keep.
        self.canonical = lru_cache(maxsize=2)(canonical)
        self._lay_out(vision)

    def write(self, folder: Path, shards: int, write_file: WriteFile = write_safetensors) -> None:
        """Write the shards and their index."""
        groups = _split(list(self.plan.values()), shards)
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            write_file(folder / file, group, self._values)
            weight_map.update((t.name, file) for t in group)
        metadata = {"total_size": sum(t.nbytes for t in self.plan.values())}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
        (folder / INDEX_NAME).write_text(index + "\n", encoding="utf-8")

    def _values(self, raw_name: str) -> Array:
        name, part = self.sources[raw_name]
        values: Array = self.canonical(name)[part]
        return values.astype(NUMPY_DTYPES[self.plan[raw_name].dtype])

    def _lay_out(self, vision: bool) -> None:
        for name, expected in expected_tensors(self.config).items():
            if name.endswith("ngram_embedding.weight"):
                self._table(name, expected.shape[1] or 0)
                continue
            shape = tuple(d or 0 for d in expected.shape)
            self.shapes[name] = shape
            if expected.dtypes == ("I64",):
                self._store(name, name, (...,), shape, "I64")
            elif ".experts." in name and self.experts == "per_expert":
                self._split_experts(name, shape)
            else:
                self._store(name, name, (...,), shape)
        if vision:
            for name in ("model.visual.pos_embed.weight", "model.visual.merger.norm.weight"):
                self.shapes[name] = (64, 32) if "pos" in name else (32,)
                self._store(name, name, (...,), self.shapes[name])

    def _store(
        self, name: str, source: str, part: tuple[Any, ...], shape: tuple[int, ...], dtype: str | None = None
    ) -> None:
        own = name.startswith(("mtp.", "lm_head.", "model."))
        raw_name = name if own else self.prefix + name
        if dtype is None:
            dtype = "F32" if name.endswith(ALWAYS_FLOAT32) else self.dtype
        self.plan[raw_name] = PlannedTensor(raw_name, dtype, shape)
        self.sources[raw_name] = (source, part)

    def _split_experts(self, name: str, shape: tuple[int, ...]) -> None:
        at, last = name.rsplit(".", 1)
        width = self.config.moe_intermediate_size
        for e in range(shape[0]):
            if last == "down_proj":
                self._store(f"{at}.{e}.down_proj.weight", name, (e,), shape[1:])
            else:
                self._store(f"{at}.{e}.gate_proj.weight", name, (e, slice(0, width)), (width, shape[2]))
                self._store(f"{at}.{e}.up_proj.weight", name, (e, slice(width, None)), (width, shape[2]))

    def _table(self, name: str, columns: int) -> None:
        rows = derive(self.config, int(name.split(".")[1])).rows
        self.shapes[name] = (rows, columns)
        parts = min(self.config.split_ngram_parts, rows)
        each = -(-rows // parts)
        for k, begin in enumerate(range(0, rows, each)):
            end = min(begin + each, rows)
            shard = name.removesuffix("weight") + f"shard_{k}.weight"
            self._store(shard, name, (slice(begin, end),), (end - begin, columns))


def _canonical(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int, scale: float) -> Array:
    if ".ple.ple_embedding." in name and not name.endswith("ngram_embedding.weight"):
        constants = derive(config, int(name.split(".")[1]))
        by_name = {
            "layer_multipliers": constants.multipliers,
            "ngram_heads_vocab_sizes": constants.head_sizes,
            "ngram_heads_offsets": constants.head_offsets,
        }
        return np.array(by_name[name.rsplit(".", 1)[1]], dtype=np.int64)
    return random_tensor(name, shape, config, seed, scale)


def _split(plan: list[PlannedTensor], shards: int) -> list[list[PlannedTensor]]:
    """Consecutive groups of about equal bytes, at least one tensor each."""
    total = sum(t.nbytes for t in plan)
    groups: list[list[PlannedTensor]] = [[]]
    before = 0
    for tensor in plan:
        if groups[-1] and before >= total * len(groups) / shards:
            groups.append([])
        groups[-1].append(tensor)
        before += tensor.nbytes
    return groups
