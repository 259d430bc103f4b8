"""Launches of the kernels at a model's sizes, with the bytes that each has to move: what the other benchmarks run.

A launch holds random inputs on a device and no expected results (the reference would take minutes at these sizes;
`tests/plugins` compares results). Every maker takes the configuration and a `Step`, and says what its op must read and
write at least: inputs, weights and states once, outputs once; of caches what the queries may choose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashnext.export.checkpoint.official_config import OFFICIAL_TEXT_CONFIG
from flashnext.export.checkpoint.random_config import DEFAULT_TEXT_CONFIG
from flashnext.export.config import ModelConfig
from flashnext.export.model.rope import rotary_frequencies

CONFIGS = {
    "official": ModelConfig.from_dict(OFFICIAL_TEXT_CONFIG),
    "small": ModelConfig.from_dict(DEFAULT_TEXT_CONFIG),
}
WINDOW = 8
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
E4M3_NAN = 0x7F


@dataclass(frozen=True)
class Step:
    """S tokens for each of B sequences after `past` ones; kernels that commit pending tokens commit as many as fit."""

    batch: int
    steps: int
    past: int = 0

    @property
    def tokens(self) -> int:
        return self.batch * self.steps


@dataclass(frozen=True)
class Launch:
    """One launch. Of the bytes read and of those written, `shared` are the same memory (a state that is replaced)."""

    op: str
    values: dict[str, Any]
    read: int
    written: int
    shared: int = 0

    @property
    def moved(self) -> int:
        """Bytes over the memory's wires."""
        return self.read + self.written

    @property
    def touched(self) -> int:
        """Distinct bytes."""
        return self.moved - self.shared


class Source:
    """Random tensors on one device, in bfloat16 unless said otherwise."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        kind = BF16 if dtype == E4M3 else dtype
        return (torch.randn(shape, generator=self._generator, device=self.device, dtype=kind) * scale).to(dtype)

    def codes(self, *shape: int, below: int = E4M3_NAN) -> Tensor:
        """Random bytes; by default those that are E4M3 numbers above zero."""
        options = {"generator": self._generator, "device": self.device, "dtype": torch.uint8}
        return torch.randint(0, below, shape, **options)

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def full(self, count: int, value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def rows(self, step: Step) -> dict[str, Tensor]:
        slots = torch.arange(step.batch, dtype=torch.int32, device=self.device)
        return {
            "slots": slots,
            "past_len": self.full(step.batch, step.past),
            "new_len": self.full(step.batch, step.steps),
        }


def nbytes(values: Mapping[str, Any], *names: str) -> int:
    """Bytes of these tensors, or of all."""
    return sum(values[n].nbytes for n in (names or values) if isinstance(values[n], Tensor))


# --- ops --------------------------------------------------------------------------------------------


def gated_residual(c: ModelConfig, step: Step, source: Source, *, state: str = "bf16", weights: str = "bf16") -> Launch:
    """The form `pending`; `state`: "bf16" or "fp8" (static scales), `weights`: "bf16" or "fp8"."""
    n, h, tokens, columns = c.hc_count, c.hidden_size, step.tokens, c.hc_count * c.hidden_size
    stored, weight = (E4M3 if kind == "fp8" else BF16 for kind in (state, weights))
    values: dict[str, Any] = {
        "r": source.normal(tokens, n, h, scale=3.0 if state == "bf16" else 60.0, dtype=stored),
        "y": source.normal(tokens, h),
        "s": source.normal(tokens, n, dtype=F32).sigmoid() * 2,
        "norm_weight": source.normal(columns, scale=0.2),
        "down_weight": source.normal(
            c.hc_lowrank, columns, scale=columns**-0.5 if weights == "bf16" else 60.0, dtype=weight
        ),
        "up_weight": source.normal(
            columns, c.hc_lowrank, scale=c.hc_lowrank**-0.5 if weights == "bf16" else 60.0, dtype=weight
        ),
        "inject_weight": source.normal(n, columns, scale=columns**-0.5),
    }
    if state == "fp8":
        values |= {name: torch.full((n,), 0.05, device=source.device) for name in ("r_scale", "r_out_scale")}
    if weights == "fp8":
        values["down_scale"] = torch.full((c.hc_lowrank,), columns**-0.5 / 60, device=source.device)
        values["up_scale"] = torch.full((columns,), c.hc_lowrank**-0.5 / 60, device=source.device)
    read = nbytes(values)
    outputs = {"r_out": source.empty(tokens, n, h, dtype=stored), "x": source.empty(tokens, h)}
    outputs["s_out"] = source.empty(tokens, n, dtype=F32)
    return Launch("gated_residual", {**values, **outputs, "eps": c.rms_norm_eps}, read, nbytes(outputs))


def ngram_injection(c: ModelConfig, step: Step, source: Source, *, state: str = "bf16") -> Launch:
    """The form `pending`."""
    n, h, columns = c.hc_count, c.hidden_size, c.hc_count * c.hidden_size
    shape, history = (step.batch, step.steps), (c.ple_conv_kernel_size - 1) * c.ngram_size
    stored = E4M3 if state == "fp8" else BF16
    values: dict[str, Any] = {
        "r": source.normal(*shape, n, h, scale=3.0 if state == "bf16" else 60.0, dtype=stored),
        "y": source.normal(*shape, h),
        "s": source.normal(*shape, n, dtype=F32).sigmoid() * 2,
        "key": source.normal(*shape, columns),
        "value": source.normal(*shape, h),
        **{f"norm_{name}_weight": source.normal(columns, scale=0.2) for name in ("key", "query", "conv")},
        "conv_weight": source.normal(columns, 1, c.ple_conv_kernel_size, scale=0.5),
        **source.rows(step),
    }
    if state == "fp8":
        values |= {name: torch.full((n,), 0.05, device=source.device) for name in ("r_scale", "r_out_scale")}
    read = nbytes(values)
    ring = source.normal(step.batch + 1, history + WINDOW, columns)
    outputs = {"r_out": source.empty(*shape, n, h, dtype=stored)}
    taps = {t - k * c.ngram_size for t in range(step.steps) for k in range(1, c.ple_conv_kernel_size)}
    old, new = len([t for t in taps if -step.past <= t < 0]), min(step.steps, history + WINDOW)
    row = step.batch * ring[0, 0].nbytes
    values |= {**outputs, "conv_state": ring, "eps": c.rms_norm_eps, "dilation": c.ngram_size}
    shared = row * max(0, old + new - history - WINDOW)
    return Launch("ngram_injection", values, read + row * old, nbytes(outputs) + row * new, shared)


def gated_delta_net(c: ModelConfig, step: Step, source: Source, *, state: str = "fp32") -> Launch:
    """Every pending token of a step as long as this one was accepted; in prefill there are none.

    `state`: "fp32" or "bf16".
    """
    K, V, Dk, Dv = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    shape, width = (step.batch, step.steps), c.linear_conv_kernel_dim
    channels, pending = c.linear_conv_dim, K * Dk + V * Dv + 2 * V
    accepted = min(step.past, step.steps) if step.steps <= WINDOW else 0
    values: dict[str, Any] = {
        "qkv": source.normal(*shape, channels),
        "z": source.normal(*shape, V * Dv),
        "a": source.normal(*shape, V),
        "b": source.normal(*shape, V),
        "conv_weight": source.normal(channels, 1, width, scale=0.5),
        "A_log": source.normal(V, scale=0.5, dtype=F32),
        "dt_bias": source.normal(V, scale=0.5, dtype=F32),
        "norm_weight": 1 + source.normal(Dv, scale=0.2, dtype=F32),
        **source.rows(step),
        "accepted": source.full(step.batch, accepted),
    }
    read, rows = nbytes(values), step.batch + 1
    states = {
        "conv_state": source.normal(rows, width - 1 + WINDOW, channels),
        "recurrent_state": source.normal(rows, V, Dk, Dv, scale=0.3, dtype=F32 if state == "fp32" else BF16),
        "pending_state": _pending(source, rows, (K, V, Dk, Dv)),
    }
    y = source.empty(*shape, V * Dv)
    conv, recurrent = states["conv_state"][0, 0].nbytes, states["recurrent_state"][0].nbytes
    kept = pending * 4 * (step.steps if step.steps <= WINDOW else 0)
    slot_read = conv * min(step.past, width - 1) + (recurrent if step.past else 0) + pending * 4 * accepted
    slot_written = conv * min(step.steps, width - 1 + WINDOW) + recurrent + kept
    slot_shared = (recurrent if step.past else 0) + min(kept, pending * 4 * accepted)
    values |= {**states, "y": y, "eps": c.rms_norm_eps, "silu_gate": 0, "key_heads": K}
    values["tickets"] = torch.zeros(step.batch, K, dtype=torch.int32, device=source.device)
    batch = step.batch
    return Launch(
        "gated_delta_net", values, read + batch * slot_read, y.nbytes + batch * slot_written, batch * slot_shared
    )


def _pending(source: Source, rows: int, sizes: tuple[int, int, int, int]) -> Tensor:
    """[k | v | g | beta] as a step leaves them: unit keys, log decays below 0, beta in (0, 1)."""
    K, V, Dk, Dv = sizes
    k = torch.nn.functional.normalize(source.normal(rows, WINDOW, K, Dk, dtype=F32), dim=-1).flatten(2)
    v = source.normal(rows, WINDOW, V * Dv, dtype=F32)
    gates = source.normal(rows, WINDOW, 2 * V, dtype=F32).sigmoid()
    gates[..., :V] *= -1
    return torch.cat([k, v, gates], -1)


def sparse_attention(c: ModelConfig, step: Step, source: Source, *, cache: str = "bf16") -> Launch:
    """The form `select`, in a cache that has room for this step and no more."""
    Nq, Nkv, D, Ni, Di = (
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.indexer_n_heads,
        c.indexer_head_dim,
    )
    shape, block, end = (step.batch, step.steps), c.indexer_compress_ratio, step.past + step.steps
    inv_freq, rope_scale = rotary_frequencies(c)
    values: dict[str, Any] = {
        "q_gate": source.normal(*shape, Nq * 2 * D),
        "k": source.normal(*shape, Nkv * D),
        "v": source.normal(*shape, Nkv * D),
        "index_qk": source.normal(*shape, (Ni + 1) * Di),
        **{name: source.normal(D, scale=0.2) for name in ("q_norm_weight", "k_norm_weight")},
        **{name: source.normal(Di, scale=0.2) for name in ("index_q_norm_weight", "index_k_norm_weight")},
        "inv_freq": inv_freq.to(source.device),
        **source.rows(step),
    }
    read, rows = nbytes(values), step.batch + 1
    if end // block <= c.budget_blocks:
        read -= step.tokens * Ni * Di * BF16.itemsize  # no block has to be scored: index queries are not needed
    states = {
        **{
            name: source.normal(rows, end + 1, Nkv, D, dtype=E4M3 if cache == "fp8" else BF16)
            for name in ("key_state", "value_state")
        },
        "index_tail_state": source.normal(rows, block - 1 + WINDOW, Di),
        "index_key_state": source.normal(rows, end // block + 1, Di),
    }
    y = source.empty(*shape, Nq * D)
    token, pooled = 2 * states["key_state"][0, 0].nbytes, states["index_key_state"][0, 0].nbytes
    chosen = min(step.past, step.steps * c.indexer_budget + end % block)
    slot_read = (chosen + step.steps) * token + end // block * pooled + min(step.past, block - 1) * pooled
    new_blocks = end // block - step.past // block
    slot_written = step.steps * token + (new_blocks + min(step.steps, block - 1 + WINDOW)) * pooled
    slot_shared = step.steps * token + new_blocks * pooled
    values |= {**states, "y": y, "eps": c.rms_norm_eps, "rope_scale": rope_scale, "block": block}
    values |= {"heads": Nq, "kv_heads": Nkv, "head_dim": D, "index_heads": Ni, "index_head_dim": Di}
    values["budget_blocks"] = c.budget_blocks
    batch = step.batch
    return Launch(
        "sparse_attention", values, read + batch * slot_read, y.nbytes + batch * slot_written, batch * slot_shared
    )


def sparse_moe(c: ModelConfig, step: Step, source: Source, *, weights: str = "bf16", experts: int = 0) -> Launch:
    """`weights`: "bf16", "fp8" (128x128 blocks) or "nvfp4"; `experts`: how many there are (0: the model's)."""
    E, h, i, tokens = experts or c.num_experts, c.hidden_size, c.moe_intermediate_size, step.tokens
    top_k = c.num_experts_per_tok
    values: dict[str, Any] = {"x": source.normal(tokens, h), "router_logits": source.normal(tokens, E)}
    read = nbytes(values)
    stored: dict[str, Tensor] = {}
    for name, shape in (("gate_up", (E, 2, i, h)), ("down", (E, h, i))):
        stored |= _expert_weights(source, name, shape, weights)
    used = len(values["router_logits"].topk(top_k).indices.unique())
    y = source.empty(tokens, h)
    values |= {**stored, "y": y, "inner": i, "top_k": top_k, "normalize": int(c.norm_topk_prob)}
    return Launch("sparse_moe", values, read + nbytes(stored) // E * used, y.nbytes)


def _expert_weights(source: Source, name: str, shape: tuple[int, ...], weights: str) -> dict[str, Tensor]:
    rows, columns = shape[-2:]
    if weights == "bf16":
        return {f"{name}_weight": source.normal(*shape, scale=columns**-0.5)}
    if weights == "fp8":
        blocks = (*shape[:-2], -(-rows // 128), -(-columns // 128))
        scale = torch.full(blocks, columns**-0.5 / 128, device=source.device)
        return {f"{name}_weight": source.codes(*shape).view(E4M3), f"{name}_scale": scale}
    groups = (*shape[:-1], columns // 16)
    return {
        f"{name}_weight": source.codes(*shape[:-1], columns // 2, below=256),
        f"{name}_group_scale": source.codes(*groups, below=0x40).view(E4M3),
        f"{name}_scale_2": torch.full(shape[:-2], columns**-0.5, device=source.device),
    }


def candidates(c: ModelConfig, step: Step, source: Source, *, count: int = 256) -> Launch:
    """The largest logits of every token, and the sum over its row."""
    count = min(count, c.vocab_size)
    values: dict[str, Any] = {"logits": source.normal(step.tokens, c.vocab_size)}
    outputs = {"values": source.empty(step.tokens, count, dtype=F32)}
    outputs["indices"] = source.empty(step.tokens, count, dtype=torch.int32)
    outputs["sums"] = source.empty(step.tokens, dtype=F32)
    read = nbytes(values)
    return Launch("candidates", {**values, **outputs, "inverse_temperature": 1.0}, read, nbytes(outputs))


MAKERS = {
    maker.__name__: maker
    for maker in (gated_residual, ngram_injection, gated_delta_net, sparse_attention, sparse_moe, candidates)
}


def make(config: str, op: str, step: Step, device: torch.device, seed: int = 0, **options: Any) -> Launch:
    """A launch of an op at the sizes of "official" or "small"."""
    launch: Launch = MAKERS[op](CONFIGS[config], step, Source(device, seed), **options)
    return launch


def sectors(launched: Launch) -> int:
    """32-byte sectors of the distinct bytes."""
    return math.ceil(launched.touched / 32)
