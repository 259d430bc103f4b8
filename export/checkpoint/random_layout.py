"""Where a random checkpoint's tensors go: names, dtypes and files, as the official conversions lay them out.

The values come from `random_weights` in canonical form (experts of a layer fused, an n-gram table whole); this module
cuts them into per-expert tensors and table shards (`random_parts`), quantizes them (`random_quantized`), puts the
prefix before the names and spreads all over the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashnext.export.checkpoint.forms import PLAIN
from flashnext.export.checkpoint.layout import expected_tensors
from flashnext.export.checkpoint.ngram_constants import derive
from flashnext.export.checkpoint.quantized_layout import FLOATS, Expected
from flashnext.export.checkpoint.random_parts import TABLE, Part, part_of
from flashnext.export.checkpoint.random_quantized import Quantization, encode, encode_rows, table_scale
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
SCALE_ENDS = ("_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale")
VISION = {"model.visual.pos_embed.weight": (64, 32), "model.visual.merger.norm.weight": (32,)}
UNQUANTIZED = Quantization()


class WeightWriter:
    """Lays the canonical tensors (experts fused, n-gram tables whole) out as the checkpoint stores them."""

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        dtype: str,
        scale: float,
        experts: Experts,
        prefix: str,
        vision: bool,
        quantization: Quantization = UNQUANTIZED,
    ) -> None:
        self.config, self.dtype, self.prefix, self.quantization = config, dtype, prefix, quantization
        self.plan: dict[str, PlannedTensor] = {}
        self.parts: dict[str, Part] = {}
        """What each stored tensor holds, by raw name."""
        self.rows = {i: derive(config, i).rows for i in config.ngram_layers}
        self.shapes = {n: e.shape for n, e in expected_tensors(config).items()}

        def canonical(name: str) -> Array:
            return _canonical(name, self._canonical_shape(name), config, seed, scale)

        # A layer's experts and a table's shards follow each other, so two whole tensors are enough to keep.
        self.canonical = lru_cache(maxsize=2)(canonical)
        self._lay_out(experts == "per_expert", vision)

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
        part, planned = self.parts[raw_name], self.plan[raw_name]
        form, is_table = self._form(part), TABLE.fullmatch(part.canonical) is not None
        if is_table and planned.shape in ((), (1,)):
            return table_scale(self.quantization.table, planned.dtype).reshape(planned.shape)
        values: Array = self.canonical(part.canonical)[part.index]
        if form == PLAIN:
            return values.astype(NUMPY_DTYPES[planned.dtype])
        if is_table:
            return encode_rows(form, values)[part.what]
        return encode(form, values, part.matrix, self.quantization.scales)[part.what]

    def _form(self, part: Part) -> str:
        if TABLE.fullmatch(part.canonical):
            return self.quantization.table
        layer, _, experts = part.canonical.partition(".mlp.experts.")
        return self.forms.expert_form(layer) if experts else PLAIN

    def _lay_out(self, per_expert: bool, vision: bool) -> None:
        config = self.config
        each = {i: -(-rows // min(config.split_ngram_parts, rows)) for i, rows in self.rows.items()}
        shards = {i: -(-rows // each[i]) for i, rows in self.rows.items()}
        self.forms = self.quantization.forms(config, per_expert, shards)
        for name, expected in expected_tensors(config, self.forms).items():
            layer = int(name.split(".")[1]) if ".ngram_embedding." in name else -1
            part = part_of(name, config.moe_intermediate_size, each.get(layer, 0))
            self._store(name, part, self._shape(expected, part, layer), self._dtype_of(name, expected))
        if vision:
            for name, shape in VISION.items():
                self.shapes[name] = shape
                self._store(name, Part(name), shape, self.dtype)

    def _shape(self, expected: Expected, part: Part, layer: int) -> tuple[int, ...]:
        if expected.shape == ():  # official BF16 scales are [1], converters' F32 ones have no axes
            return (1,) if self.quantization.scales == "BF16" and ".ple." in part.canonical else ()
        rows = len(range(*part.index[0].indices(self.rows[layer]))) if layer >= 0 else 0
        return tuple(rows if d is None else d for d in expected.shape)

    def _dtype_of(self, name: str, expected: Expected) -> str:
        if expected.dtypes != FLOATS:
            return expected.dtypes[0]
        if name.endswith(SCALE_ENDS):
            return self.quantization.scales
        return "F32" if name.endswith(ALWAYS_FLOAT32) else self.dtype

    def _store(self, name: str, part: Part, shape: tuple[int, ...], dtype: str) -> None:
        raw_name = name if name.startswith(("mtp.", "lm_head.", "model.")) else self.prefix + name
        self.plan[raw_name] = PlannedTensor(raw_name, dtype, shape)
        self.parts[raw_name] = part

    def _canonical_shape(self, name: str) -> tuple[int, ...]:
        rows = self.rows[int(name.split(".")[1])] if TABLE.fullmatch(name) else 0
        return tuple(rows if d is None else d for d in self.shapes[name])


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
