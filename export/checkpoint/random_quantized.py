"""Quantized random checkpoints, in layouts that are met in the wild, with scales that cannot be forgotten unnoticed.

Scales are far from 1 and differ from block to block by powers of two up to 256: a reader that leaves one out, or takes
another block's, computes something else altogether. Codes keep full precision, because E4M3 has range to spare.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from flashnext.export import number_formats
from flashnext.export.checkpoint.forms import FP8, FP8_BLOCK, NVFP4, PLAIN, Forms
from flashnext.export.checkpoint.layout import MTP_LAYER
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.config import ModelConfig
from flashnext.export.number_formats import BLOCK, GROUP

Array = np.ndarray[Any, Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
TABLE_SCALES = {FP8: 0.37, NVFP4: 0.0123}


@dataclass(frozen=True)
class Quantization:
    """Forms of a checkpoint's parts, the dtype of their scales, and how and in which file they are declared.

    `others` gives the form of layers of the main model that are stored otherwise than the rest; `packed` calls the
    table's tensors `weight_packed` and `weight_global_scale`.
    """

    experts: str = PLAIN
    mtp: str = PLAIN
    table: str = PLAIN
    scales: str = "BF16"
    others: Mapping[int, str] = field(default_factory=dict)
    packed: bool = False
    method: str = ""
    file: str = "config.json"

    def forms(self, config: ModelConfig, per_expert: bool, parts: Mapping[int, int]) -> Forms:
        """What the reader has to recognise; `parts` gives the number of shards of each n-gram table."""
        layers = {f"layers.{i}": self.experts for i in range(config.num_hidden_layers)}
        layers |= {f"layers.{i}": form for i, form in self.others.items()}
        layers |= {MTP_LAYER: self.mtp} if config.has_mtp else {}
        return Forms(
            frozenset(layers) if per_expert else frozenset(),
            {layer: form for layer, form in layers.items() if form != PLAIN},
            parts,
            {i: self.table for i in config.ngram_layers if self.table != PLAIN},
            frozenset(config.ngram_layers) if self.packed else frozenset(),
        )


QUANTIZATIONS = {
    "fp8": Quantization(FP8_BLOCK, FP8_BLOCK, FP8, method="fp8"),
    "fp8-bf16-mtp": Quantization(FP8_BLOCK, PLAIN, NVFP4, "F32", packed=True, method="fp8"),
    "nvfp4": Quantization(NVFP4, PLAIN, FP8, "F32", method="NVFP4"),
    "nvfp4-all": Quantization(NVFP4, NVFP4, NVFP4, "F32", method="NVFP4", file="hf_quant_config.json"),
    "mixed": Quantization(NVFP4, FP8_BLOCK, FP8, "BF16", {0: PLAIN, 2: FP8_BLOCK}, method="MIXED_PRECISION"),
}
"""The official FP8 release; FP8 with an unquantized MTP layer and a table of another origin; NVFP4 as communities
convert it; everything NVFP4, declared in ModelOpt's own file; NVIDIA's mixture, with a layer
in BF16 and one in FP8 besides."""


def declaration(quantization: Quantization, config: ModelConfig) -> dict[str, Any]:
    """The quantization settings as the converters write them."""
    if quantization.method == "fp8":
        kept = ["lm_head", "model.language_model.embed_tokens"] + (["mtp"] if quantization.mtp == PLAIN else [])
        blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        return {"quant_method": "fp8", **blocks, "modules_to_not_convert": kept}
    ignored = ["lm_head", "*.self_attn*", "*.linear_attn*", "*.ple.*"] + (["mtp*"] if quantization.mtp == PLAIN else [])
    settings: dict[str, Any] = {"quant_algo": quantization.method, "group_size": GROUP, "exclude_modules": ignored}
    if quantization.method == "MIXED_PRECISION":
        settings["quantized_layers"] = dict(_entries(quantization, config))
    if quantization.file == "config.json":
        settings["ignore"] = settings.pop("exclude_modules")
        return {"quant_method": "modelopt", **settings}
    return {"producer": {"name": "modelopt"}, "quantization": settings}


def _entries(quantization: Quantization, config: ModelConfig) -> list[tuple[str, dict[str, Any]]]:
    algorithms: dict[str, dict[str, Any]] = {
        FP8: {"quant_algo": "FP8"},
        FP8_BLOCK: {"quant_algo": "FP8_PB_WO", "group_size": BLOCK},
        NVFP4: {"quant_algo": "NVFP4", "group_size": GROUP},
    }
    prefix = "model.language_model."
    forms = quantization.forms(config, True, {})
    named = [(layer if layer == MTP_LAYER else prefix + layer, form) for layer, form in forms.experts.items()]
    tables = [(f"{prefix}layers.{i}.ple.ple_embedding.ngram_embedding", form) for i, form in forms.tables.items()]
    return [(f"{layer}.mlp.experts", algorithms[form]) for layer, form in named] + [
        (module, algorithms[form]) for module, form in tables
    ]


# --- values of codes and scales -------------------


def encode(form: str, values: Array, name: str, scales: str) -> dict[str, Array]:
    """Codes and scales of a matrix by the ends of their tensors' names; `name` seeds the scales' spread."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if form == FP8_BLOCK:
        codes, scale = _fp8_block(values, random, NUMPY_DTYPES[scales])
        return {"weight": codes, "weight_scale_inv": scale}
    largest = float(np.abs(values).max()) / (LARGEST_E2M1 * LARGEST_E4M3)
    scale_2 = np.float32(largest * 2.0 ** random.uniform(0, 6))
    codes, scale = _nvfp4(values, scale_2)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": np.array(scale_2)}


def encode_rows(form: str, values: Array) -> dict[str, Array]:
    """Codes and row scales of n-gram rows, for the table's scale of `TABLE_SCALES` rounded to BF16."""
    scale = table_scale(form, "F32")
    if form == FP8:
        return {"weight": (values / scale).astype(E4M3)}
    codes, row_scales = _nvfp4(values, scale)
    return {"weight": codes, "weight_packed": codes, "weight_scale": row_scales}


def table_scale(form: str, dtype: str) -> Array:
    """The one scale of a table, the same number in every dtype."""
    return np.array(TABLE_SCALES[form]).astype(ml_dtypes.bfloat16).astype(NUMPY_DTYPES[dtype])


def _fp8_block(values: Array, random: np.random.Generator, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    rows, columns = (-(-size // BLOCK) for size in values.shape[-2:])
    missing = [(0, rows * BLOCK - values.shape[-2]), (0, columns * BLOCK - values.shape[-1])]
    blocks = np.pad(values, [(0, 0)] * (values.ndim - 2) + missing).reshape(
        *values.shape[:-2], rows, BLOCK, columns, BLOCK
    )
    largest = np.abs(blocks).max(axis=(-3, -1)) / LARGEST_E4M3
    scale = (largest * 2.0 ** random.uniform(0, 8, largest.shape)).astype(dtype)
    ones = np.full(values.shape, 0x38, np.uint8)  # the code of 1.0
    return (values / number_formats.dequantize_fp8_block(ones, scale)).astype(E4M3), scale


def _nvfp4(values: Array, scale_2: Array | np.float32) -> tuple[Array, Array]:
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    scale = (np.abs(groups).max(-1) / LARGEST_E2M1 / scale_2).clip(2**-6, LARGEST_E4M3).astype(E4M3)
    scaled = (groups / (scale.astype(np.float32) * scale_2)[..., None]).clip(-LARGEST_E2M1, LARGEST_E2M1)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(values.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale
