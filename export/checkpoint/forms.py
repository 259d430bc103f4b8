"""Which of the alternative forms a checkpoint's tensors have, recognised by names and dtypes.

Routed experts: fused or a tensor for each expert; BF16/F16/F32 ("plain"), E4M3 with a scale per 128x128 block
("fp8_block") or NVFP4 ("nvfp4"). Each MoE block is looked at on its own, because MTP layers are often converted
separately and some layers may stay unquantized. N-gram tables: one tensor or shards; plain, "fp8" with one scale, or
"nvfp4" with scales in every row and one for the table.

What the files hold decides; `quantization.py` compares it with what the configuration says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN, FP8_BLOCK, FP8, NVFP4 = "plain", "fp8_block", "fp8", "nvfp4"

EXPERT_NAME = re.compile(r"((?:mtp\.)?layers\.\d{1,6})\.mlp\.experts\.(?:(\d{1,6})\.|gate_up_proj$)")
TABLE_NAME = re.compile(
    r"layers\.(\d{1,6})\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d{1,6})\.)?weight(_packed|_global_scale)?"
)
EXPERT_FORMS = {"F8_E4M3": FP8_BLOCK, "U8": NVFP4}
"""Form of a layer's experts by the dtype of its first one's gate; any other dtype is plain."""
TABLE_FORMS = {"F8_E4M3": FP8, "U8": NVFP4}


@dataclass(frozen=True)
class Table:
    """Tensors of an n-gram table: codes (or values) in order of their rows, one scale for all, and scales by row."""

    form: str
    shards: tuple[str, ...]
    scale: str = ""
    row_scales: tuple[str, ...] = ()


@dataclass(frozen=True)
class Forms:
    """What is in none of these is stored whole and unquantized.

    `per_expert` names the layers ("layers.3", "mtp.layers.0") whose experts are stored one by one, `experts` gives the
    form of quantized ones. `shards` gives the number of n-gram shards of a layer, `tables` the form of quantized
    tables; those in `packed` call their tensors `weight_packed` and `weight_global_scale`.
    """

    per_expert: frozenset[str] = frozenset()
    experts: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[int, int] = field(default_factory=dict)
    tables: Mapping[int, str] = field(default_factory=dict)
    packed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, dtypes: Mapping[str, str]) -> Forms:
        """Recognise the forms of tensors given as name -> dtype."""
        per_expert: set[str] = set()
        experts: dict[str, str] = {}
        for name in dtypes:
            if match := EXPERT_NAME.match(name):
                layer, number = match.groups()
                if number is not None:
                    per_expert.add(layer)
                if number is None or name.endswith(".0.gate_proj.weight"):
                    experts[layer] = EXPERT_FORMS.get(dtypes[name], PLAIN)
        quantized = {layer: form for layer, form in experts.items() if form != PLAIN}
        return cls(frozenset(per_expert), quantized, *_tables(dtypes))

    def expert_form(self, layer: str) -> str:
        """ "plain", "fp8_block" or "nvfp4"."""
        return self.experts.get(layer, PLAIN)

    def table(self, layer: int) -> Table:
        """The n-gram table's tensors by name."""
        at = f"layers.{layer}.ple.ple_embedding.ngram_embedding"
        count = self.shards.get(layer)
        parts = [at] if count is None else [f"{at}.shard_{k}" for k in range(count)]
        form, packed = self.tables.get(layer, PLAIN), layer in self.packed
        shards = tuple(f"{part}.{'weight_packed' if packed else 'weight'}" for part in parts)
        if form == FP8:
            return Table(form, shards, f"{at}.weight_scale")
        if form == NVFP4:
            scale = f"{at}.{'weight_global_scale' if packed else 'weight_scale_2'}"
            return Table(form, shards, scale, tuple(f"{part}.weight_scale" for part in parts))
        return Table(form, shards)


def _tables(dtypes: Mapping[str, str]) -> tuple[dict[int, int], dict[int, str], frozenset[int]]:
    numbers: dict[int, set[int]] = {}
    forms: dict[int, str] = {}
    packed: set[int] = set()
    for name, dtype in dtypes.items():
        match = TABLE_NAME.fullmatch(name)
        if match is None:
            continue
        layer, shard, suffix = int(match[1]), match[2], match[3]
        if suffix is not None:
            packed.add(layer)
        if suffix == "_global_scale":
            continue
        if shard is not None:
            numbers.setdefault(layer, set()).add(int(shard))
        forms.setdefault(layer, TABLE_FORMS.get(dtype, PLAIN))
    quantized = {layer: form for layer, form in forms.items() if form != PLAIN}
    return {layer: _shard_count(found) for layer, found in numbers.items()}, quantized, frozenset(packed)


def _shard_count(numbers: set[int]) -> int:
    """Up to the highest number, so that a gap is found missing; but one stray number must not ask for thousands."""
    highest = max(numbers) + 1
    return highest if highest <= 2 * len(numbers) else len(numbers)
