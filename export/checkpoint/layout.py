"""Which tensors a checkpoint has to hold: name, shape and dtypes, from the configuration alone.

Names are the checkpoint's without their prefix (`model.language_model.` or `model.`). Routed experts and n-gram tables
come in alternative forms (`forms.py`), and what is present decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from flashnext.export.checkpoint import quantized_layout
from flashnext.export.checkpoint.forms import Forms
from flashnext.export.checkpoint.quantized_layout import Expected, Shape, Tensors
from flashnext.export.checkpoint.safetensors_file import TensorInfo, shown
from flashnext.export.config import LINEAR_ATTENTION, ModelConfig
from flashnext.export.errors import CheckpointError

MTP_LAYER = "mtp.layers.0"

MAX_TENSORS = 1 << 20
"""More than any real checkpoint: the official one stored per expert with NVFP4 scales has about 300,000."""


def expected_tensors(config: ModelConfig, forms: Forms | None = None) -> dict[str, Expected]:
    """The complete list of tensors for a configuration.

    Raises:
        CheckpointError: a configuration of more tensors than any checkpoint has.
    """
    listed = dict(islice(_tensors(config, forms or Forms()), MAX_TENSORS))
    if len(listed) == MAX_TENSORS:
        raise CheckpointError(f"config.json describes {MAX_TENSORS:,} tensors or more; no checkpoint has so many.")
    return listed


def layout_faults(expected: Mapping[str, Expected], found: Mapping[str, TensorInfo]) -> list[list[str]]:
    """Tensors that are missing, surplus, misshapen and of a wrong dtype: a line for each, in a list for each kind."""
    missing = [
        f"missing: {name}, expected {_shape(e.shape)} {_either(e.dtypes)}"
        for name, e in expected.items()
        if name not in found and not e.optional
    ]
    surplus = [
        f"surplus: {shown(info.raw_name)}, {_shape(info.shape)} {info.dtype}, is not part of the model"
        for name, info in found.items()
        if name not in expected
    ]
    both = [(name, found[name], e) for name, e in expected.items() if name in found]
    shapes = [
        f"wrong shape: {name} is {_shape(info.shape)}, expected {_shape(e.shape)}"
        for name, info, e in both
        if not _fits(info.shape, e.shape)
    ]
    dtypes = [
        f"wrong dtype: {name} is {info.dtype}, expected {_either(e.dtypes)}"
        for name, info, e in both
        if info.dtype not in e.dtypes
    ]
    return [missing, surplus, shapes, dtypes]


# --- the model's parts ------------------------------


def _tensors(c: ModelConfig, forms: Forms) -> Tensors:
    yield "embed_tokens.weight", Expected((c.vocab_size, c.hidden_size))
    if not c.tie_word_embeddings:
        yield "lm_head.weight", Expected((c.vocab_size, c.hidden_size))
    for i, kind in enumerate(c.layer_types):
        if i in c.ngram_layers:
            yield from _ngram(c, i, forms)
        yield from _decoder_layer(c, f"layers.{i}", kind == LINEAR_ATTENTION, forms)
    yield from _gated_residual(c, "hyper_connection_mixer", writes=False)
    if c.has_mtp:
        yield from _mtp(c, forms)


def _decoder_layer(c: ModelConfig, layer: str, linear: bool, forms: Forms) -> Tensors:
    yield from _gated_residual(c, f"{layer}.attn_hyper_connection", writes=True)
    yield from _gated_delta_net(c, f"{layer}.linear_attn") if linear else _attention(c, f"{layer}.self_attn")
    yield from _gated_residual(c, f"{layer}.mlp_hyper_connection", writes=True)
    yield from _moe(c, layer, forms)


def _gated_residual(c: ModelConfig, at: str, writes: bool) -> Tensors:
    wide = c.hc_count * c.hidden_size
    yield f"{at}.hc_norm.weight", Expected((wide,))
    yield f"{at}.input_mix_weight_down.weight", Expected((c.hc_lowrank, wide))
    yield f"{at}.input_mix_weight_up.weight", Expected((wide, c.hc_lowrank))
    if writes:
        yield f"{at}.block_inject_weight.weight", Expected((c.hc_count, wide))


def _gated_delta_net(c: ModelConfig, at: str) -> Tensors:
    heads, hidden = c.linear_num_value_heads, c.hidden_size
    yield f"{at}.in_proj_qkv.weight", Expected((c.linear_conv_dim, hidden))
    yield f"{at}.in_proj_z.weight", Expected((c.linear_value_dim, hidden))
    yield f"{at}.in_proj_b.weight", Expected((heads, hidden))
    yield f"{at}.in_proj_a.weight", Expected((heads, hidden))
    yield f"{at}.conv1d.weight", Expected((c.linear_conv_dim, 1, c.linear_conv_kernel_dim))
    yield f"{at}.A_log", Expected((heads,))
    yield f"{at}.dt_bias", Expected((heads,))
    yield f"{at}.norm.weight", Expected((c.linear_value_head_dim,))
    yield f"{at}.out_proj.weight", Expected((hidden, c.linear_value_dim))


def _attention(c: ModelConfig, at: str) -> Tensors:
    queries, keys, hidden = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.hidden_size
    yield f"{at}.q_proj.weight", Expected((2 * queries, hidden))
    yield f"{at}.k_proj.weight", Expected((keys, hidden))
    yield f"{at}.v_proj.weight", Expected((keys, hidden))
    yield f"{at}.o_proj.weight", Expected((hidden, queries))
    yield f"{at}.q_norm.weight", Expected((c.head_dim,))
    yield f"{at}.k_norm.weight", Expected((c.head_dim,))
    yield f"{at}.indexer.index_qk_proj.weight", Expected(((c.indexer_n_heads + 1) * c.indexer_head_dim, hidden))
    yield f"{at}.indexer.q_layernorm.weight", Expected((c.indexer_head_dim,))
    yield f"{at}.indexer.k_layernorm.weight", Expected((c.indexer_head_dim,))


def _moe(c: ModelConfig, layer: str, forms: Forms) -> Tensors:
    at = f"{layer}.mlp"
    yield f"{at}.gate.weight", Expected((c.num_experts, c.hidden_size))
    yield from quantized_layout.experts(c, at, forms.expert_form(layer), layer in forms.per_expert)
    yield from _mlp(c, f"{at}.shared_expert", c.shared_expert_intermediate_size)
    yield f"{at}.shared_expert_gate.weight", Expected((1, c.hidden_size))


def _mlp(c: ModelConfig, at: str, width: int) -> Tensors:
    yield f"{at}.gate_proj.weight", Expected((width, c.hidden_size))
    yield f"{at}.up_proj.weight", Expected((width, c.hidden_size))
    yield f"{at}.down_proj.weight", Expected((c.hidden_size, width))


def _ngram(c: ModelConfig, layer: int, forms: Forms) -> Tensors:
    at, wide = f"layers.{layer}.ple", c.hc_count * c.hidden_size
    # Constants of the hash: stored by official checkpoints, derived when absent (ngram_constants).
    for name, size in (
        ("layer_multipliers", c.ngram_size),
        ("ngram_heads_vocab_sizes", c.ngram_heads),
        ("ngram_heads_offsets", c.ngram_heads),
    ):
        yield f"{at}.ple_embedding.{name}", Expected((size,), ("I64",), optional=True)
    yield from quantized_layout.table(c, forms.table(layer))
    yield f"{at}.key_proj.weight", Expected((wide, c.ple_embed_dim))
    yield f"{at}.value_proj.weight", Expected((c.hidden_size, c.ple_embed_dim))
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{at}.{norm}.weight", Expected((wide,))
    yield f"{at}.conv1d.weight", Expected((wide, 1, c.ple_conv_kernel_size))


def _mtp(c: ModelConfig, forms: Forms) -> Tensors:
    hidden = c.hidden_size
    yield "mtp.fc_embedding.weight", Expected((hidden, hidden))
    yield "mtp.fc_hidden.weight", Expected((hidden, hidden))
    yield "mtp.pre_fc_norm_embedding.weight", Expected((hidden,))
    yield "mtp.pre_fc_norm_hidden.weight", Expected((c.hc_count * hidden,))
    yield from _decoder_layer(c, MTP_LAYER, linear=False, forms=forms)
    yield from _gated_residual(c, "mtp.hyper_connection_mixer", writes=False)


# --- words of the messages ------------------------------


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    if expected == ():
        return shape in ((), (1,))
    return len(shape) == len(expected) and all(e in (None, s) for s, e in zip(shape, expected, strict=True))


def _shape(shape: Shape) -> str:
    return "[" + ", ".join("rows" if d is None else str(d) for d in shape) + "]"


def _either(dtypes: tuple[str, ...]) -> str:
    return dtypes[0] if len(dtypes) == 1 else f"{', '.join(dtypes[:-1])} or {dtypes[-1]}"
