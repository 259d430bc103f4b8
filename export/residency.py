"""What lies where when a model runs on a GPU, whether it fits, and what would make it fit.

On the device: all weights but the n-gram table, and the states of all slots. Pinned host memory: buffers through
which n-gram rows travel. Mapped: the n-gram table stays in the checkpoint's files. Figures come from headers; the one
assumption is `RESERVE_BYTES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from flashnext.export.checkpoint.forms import FP8_BLOCK, NVFP4, PLAIN, Forms
from flashnext.export.checkpoint.safetensors_file import TensorInfo
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.inventory import count_parts, slot_bytes
from flashnext.export.kv_cache import KvCache

RESERVE_BYTES = 2 << 30
"""Kept free on the device for the driver's context, captured graphs and activations: an assumption, not a figure."""
MAPPED_PART = "n-gram table"
PREFILL_CHUNK = 512
ROW_BUFFERS = 2
"""One is filled while the other is copied."""

BITS = {PLAIN: 16.0, FP8_BLOCK: 8.0 + 16 / 128**2, NVFP4: 4.0 + 8 / 16}
"""Bits of an expert's parameter by form, its share of a scale included."""
FORM_NAMES = {PLAIN: "unquantized", FP8_BLOCK: "FP8 in blocks of 128x128", NVFP4: "NVFP4"}


@dataclass(frozen=True)
class Residency:
    """Bytes by place and part; what is free when all is there (negative: missing); what would make it fit."""

    device: dict[str, int]
    pinned: dict[str, int]
    mapped: dict[str, int]
    free: int
    remedies: list[str]

    @property
    def fits(self) -> bool:
        return self.free >= 0


def residency(
    tensors: Mapping[str, TensorInfo], config: ModelConfig, forms: Forms, options: BuildOptions, gpu_bytes: int
) -> Residency:
    """Place a checkpoint on a GPU of `gpu_bytes` with the slots, capacity, window and dtype of `options`."""
    parts = {p.name: p.bytes for p in count_parts(tensors)}
    weights = {name: size for name, size in parts.items() if name != MAPPED_PART}
    each = slot_bytes(config, options)
    device = {
        **weights,
        f"states of {options.slots} slots and a spare one": (options.slots + 1) * each,
        "reserve": RESERVE_BYTES,
    }
    free = gpu_bytes - sum(device.values())
    rows = options.slots * max(PREFILL_CHUNK, options.window) * config.ple_embed_dim * 2 * len(config.ngram_layers)
    remedies = [] if free >= 0 else _remedies(config, forms, options, -free, gpu_bytes)
    return Residency(
        device,
        {"buffers of n-gram rows": ROW_BUFFERS * rows} if rows else {},
        {name: size for name, size in parts.items() if name == MAPPED_PART},
        free,
        remedies,
    )


def _remedies(config: ModelConfig, forms: Forms, options: BuildOptions, missing: int, gpu_bytes: int) -> list[str]:
    room = (options.slots + 1) * slot_bytes(config, options) - missing
    slots = room // slot_bytes(config, options) - 1
    capacity = _capacity(config, options, room)
    found = [f"--slots {slots}"] if slots >= 1 else []
    found += [f"--capacity {capacity}"] if capacity else []
    in_fp8 = dataclasses.replace(options, kv_cache=KvCache.unscaled(config))
    saved = (options.slots + 1) * (slot_bytes(config, options) - slot_bytes(config, in_fp8))
    found += ["--kv-cache-dtype fp8"] if saved >= missing else []
    found += [
        f"a checkpoint with experts in {FORM_NAMES[form]}"
        for form in (FP8_BLOCK, NVFP4)
        if _saved(config, forms, form) >= missing
    ]
    return [*found, f"a GPU of {_round_up(gpu_bytes + missing)} GB"]


def _capacity(config: ModelConfig, options: BuildOptions, room: int) -> int:
    """Tokens of a slot for which the states fit into `room`: memory grows with them in a straight line."""
    step = 64 * config.indexer_compress_ratio

    def size(tokens: int) -> int:
        return slot_bytes(config, dataclasses.replace(options, capacity=tokens))

    growth = size(2 * step) - size(step)
    steps = (room // (options.slots + 1) - size(step)) // growth + 1
    return min(steps * step, options.capacity) if steps >= 1 else 0


def _saved(config: ModelConfig, forms: Forms, form: str) -> int:
    """Bytes saved by storing all experts in a form; layers that are smaller already keep theirs."""
    layers = [f"layers.{i}" for i in range(config.num_hidden_layers)] + ["mtp.layers.0"] * config.has_mtp
    each = 3 * config.num_experts * config.moe_intermediate_size * config.hidden_size
    return int(sum(max(0.0, BITS[forms.expert_form(layer)] - BITS[form]) for layer in layers) / 8 * each)


def _round_up(count: int) -> int:
    return -(-count // 10**9)
