"""Model configuration: what `config.json` of a `qwen4_exp` checkpoint says, parsed and checked.

The transformers package is not needed: a checkpoint's configuration is data from strangers, so every field is read by
name, typed, bounded and cross-checked here, and all faults are reported together. Field names are the checkpoint's.

    config = ModelConfig.from_folder("path/to/checkpoint")
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.export.errors import ConfigError
from flashnext.export.fields import MAX_SIZE, FieldReader
from flashnext.export.files import plain, read_json_object
from flashnext.export.rope_config import RopeConfig, parse_rope

LINEAR_ATTENTION = "linear_attention"
SPARSE_ATTENTION = "sparse_attention"
"""The two layer types inside this project; checkpoints spell the second one in three ways."""

LAYER_TYPE_SPELLINGS = {
    "linear_attention": LINEAR_ATTENTION,
    "full_attention": SPARSE_ATTENTION,
    "qwen_sparse_attention": SPARSE_ATTENTION,
    "indexed_attention": SPARSE_ATTENTION,
}
MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True)
class ModelConfig:
    """The text model's configuration, flat, with the checkpoint's own field names.

    `eos_token_id` keeps the whole list; the n-gram history restarts at its first entry (`ngram_eos`).
    `ple_layer_ids` are one-based, as in the checkpoint; `ngram_layers` gives the zero-based layer indices.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    indexer_n_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    layer_types: tuple[str, ...]
    hc_count: int = 4
    hc_lowrank: int = 320
    linear_conv_kernel_dim: int = 4
    norm_topk_prob: bool = True
    output_gate_type: str = "sigmoid"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 262144
    tie_word_embeddings: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)
    ple_layer_ids: tuple[int, ...] = ()
    ple_embed_dim: int = 0
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 1
    seed: int = 1234
    mtp_num_hidden_layers: int = 0
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    # --- derived sizes ------------------------------

    @property
    def ngram_layers(self) -> tuple[int, ...]:
        """Zero-based indices of the layers that start with an n-gram injection."""
        return tuple(i - 1 for i in self.ple_layer_ids)

    @property
    def ngram_heads(self) -> int:
        """Hash heads per n-gram layer: `heads_per_ngram` for each order from 2 to `ngram_size`."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_eos(self) -> int:
        """Token at which the n-gram history restarts."""
        return self.eos_token_id[0]

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of the causal convolution over [q | k | v]."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def budget_blocks(self) -> int:
        """Complete blocks that a query may choose."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def has_mtp(self) -> bool:
        return self.mtp_num_hidden_layers > 0

    # --- reading ------------------------------

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint folder.

        Raises:
            ConfigError: no such file, not JSON, another model type, or values that do not form a model.
        """
        return cls.from_dict(read_config(Path(folder)))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Parse a nested (`text_config`) or flat configuration and check it; all faults are listed at once."""
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"The configuration's model_type is {model_type!r:.80}; this project runs {' or '.join(MODEL_TYPES)}. "
                "Point to a Qwen3.8-Flash-Next checkpoint."
            )
        text = raw.get("text_config", raw)
        if not isinstance(text, dict):
            raise ConfigError(f"text_config must be an object, found {type(text).__name__}.")
        merged = {**{k: raw[k] for k in ("tie_word_embeddings", "eos_token_id") if k in raw}, **text}
        reader = FieldReader(merged)
        config = _read_fields(cls, reader)
        faults = reader.faults or _cross_checks(config)
        if faults:
            raise ConfigError(
                "The model configuration cannot be used:\n" + "\n".join(f"  - {plain(f)}" for f in faults)
            )
        return config

    # --- the bundle's manifest carries the configuration too ------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The configuration in checkpoint form: `from_dict(config.to_dict()) == config`."""
        out = dataclasses.asdict(self)
        rope = {k: v for k, v in out.pop("rope").items() if v is not None}
        out.update(model_type="qwen4_exp_text", rope_parameters=rope, indexer_kv_heads=1, hidden_act="silu")
        out["layer_types"] = ["full_attention" if t == SPARSE_ATTENTION else t for t in self.layer_types]
        out["ple_layer_ids"], out["eos_token_id"] = list(self.ple_layer_ids), list(self.eos_token_id)
        return out

    def with_overrides(self, **changes: Any) -> ModelConfig:
        """A copy with some fields replaced (`indexer_budget`, `rope`), checked again."""
        config = dataclasses.replace(self, **changes)
        if faults := _cross_checks(config):
            raise ConfigError("The changed configuration cannot be used: " + "; ".join(faults))
        return config


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder as it is; ConfigError when it cannot be read."""
    what = "config.json of a Hugging Face checkpoint"
    return read_json_object(folder / "config.json", ConfigError, what, MAX_CONFIG_BYTES)


def _read_fields(cls: type[ModelConfig], r: FieldReader) -> ModelConfig:
    layers = r.integer("num_hidden_layers", high=1024)
    hidden = r.integer("hidden_size", high=1 << 17)
    vocab = r.integer("vocab_size")
    eos = r.integers("eos_token_id", 0, (1 << 24) - 1)
    if r.raw.get("indexer_kv_heads", 1) != 1:
        r.faults.append(f"indexer_kv_heads = {r.raw['indexer_kv_heads']!r}; the model has one index key per token")
    act = r.choice("hidden_act", "silu", ("silu",))
    return cls(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=r.integer("num_attention_heads", high=1024),
        num_key_value_heads=r.integer("num_key_value_heads", high=1024),
        head_dim=r.integer("head_dim", high=4096),
        linear_num_key_heads=r.integer("linear_num_key_heads", high=1024),
        linear_num_value_heads=r.integer("linear_num_value_heads", high=1024),
        linear_key_head_dim=r.integer("linear_key_head_dim", high=4096),
        linear_value_head_dim=r.integer("linear_value_head_dim", high=4096),
        num_experts=r.integer("num_experts", high=1 << 14),
        num_experts_per_tok=r.integer("num_experts_per_tok", high=1 << 14),
        moe_intermediate_size=r.integer("moe_intermediate_size", high=1 << 17),
        shared_expert_intermediate_size=r.integer("shared_expert_intermediate_size", high=1 << 17),
        indexer_n_heads=r.integer("indexer_n_heads", high=1024),
        indexer_head_dim=r.integer("indexer_head_dim", high=4096),
        indexer_budget=r.integer("indexer_budget"),
        indexer_compress_ratio=r.integer("indexer_compress_ratio", high=4096),
        layer_types=_layer_types(r, layers),
        hc_count=r.integer("hc_count", 4, low=2, high=64),
        hc_lowrank=r.integer("hc_lowrank", 320, high=1 << 16),
        linear_conv_kernel_dim=r.integer("linear_conv_kernel_dim", 4, low=2, high=64),
        norm_topk_prob=r.boolean("norm_topk_prob", True),
        output_gate_type=r.choice("output_gate_type", act, ("sigmoid", "silu")),
        rms_norm_eps=r.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        attention_bias=r.boolean("attention_bias", False),
        max_position_embeddings=r.integer("max_position_embeddings", 32768, high=1 << 26),
        tie_word_embeddings=r.boolean("tie_word_embeddings", False),
        rope=_rope(r),
        ple_layer_ids=tuple(sorted(set(r.integers("ple_layer_ids", 1, layers)))),
        ple_embed_dim=r.integer("ple_embed_dim", hidden, high=1 << 17),
        ple_conv_kernel_size=r.integer("ple_conv_kernel_size", 4, low=2, high=64),
        ngram_size=r.integer("ngram_size", 3, low=2, high=16),
        heads_per_ngram=r.integer("heads_per_ngram", 8, high=256),
        ngram_vocab_size_base=r.integer("ngram_vocab_size_base", 20_000_000, low=2, high=1 << 32),
        make_ngram_vocab_size_divisible_by=r.integer("make_ngram_vocab_size_divisible_by", 128, high=1 << 24),
        split_ngram_parts=r.integer("split_ngram_parts", 512, high=1 << 16),
        seed=r.integer("seed", 1234, low=0, high=1 << 62),
        mtp_num_hidden_layers=r.integer("mtp_num_hidden_layers", 0, low=0, high=1),
        eos_token_id=eos,
        bos_token_id=r.optional("bos_token_id"),
        pad_token_id=r.optional("pad_token_id"),
    )


def _layer_types(r: FieldReader, layers: int) -> tuple[str, ...]:
    raw = r.raw.get("layer_types")
    if raw is None:
        interval = r.integer("full_attention_interval", 4, high=1024)
        return tuple(LINEAR_ATTENTION if (i + 1) % interval else SPARSE_ATTENTION for i in range(layers))
    if not isinstance(raw, list) or len(raw) != layers:
        r.faults.append(f"layer_types must list {layers} layer types, found {str(raw)[:80]}")
        return (LINEAR_ATTENTION,) * layers
    unknown = sorted({str(t) for t in raw if not isinstance(t, str) or t not in LAYER_TYPE_SPELLINGS})
    if unknown:
        r.faults.append(f"layer_types holds {', '.join(unknown)}; known are {', '.join(LAYER_TYPE_SPELLINGS)}")
    return tuple(LAYER_TYPE_SPELLINGS.get(str(t), LINEAR_ATTENTION) for t in raw)


def _rope(r: FieldReader) -> RopeConfig:
    raw = r.raw.get("rope_parameters") or r.raw.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        r.faults.append(f"rope_parameters must be an object, found {raw!r}")
        raw = {}
    shared: dict[str, Any] = {k: r.raw[k] for k in ("rope_theta", "partial_rotary_factor") if k in r.raw}
    rope, faults = parse_rope({**shared, **raw}, r.raw.get("max_position_embeddings"))
    r.faults.extend(faults)
    return rope


def _cross_checks(c: ModelConfig) -> list[str]:
    """Relations between fields, each with both values in its sentence."""
    checks = [
        (
            c.num_attention_heads % c.num_key_value_heads == 0,
            f"num_attention_heads = {c.num_attention_heads} is not a multiple of "
            f"num_key_value_heads = {c.num_key_value_heads}",
        ),
        (
            c.linear_num_value_heads % c.linear_num_key_heads == 0,
            f"linear_num_value_heads = {c.linear_num_value_heads} is not a multiple of "
            f"linear_num_key_heads = {c.linear_num_key_heads}",
        ),
        (
            c.num_experts_per_tok <= c.num_experts,
            f"num_experts_per_tok = {c.num_experts_per_tok} exceeds num_experts = {c.num_experts}",
        ),
        (
            c.indexer_budget % c.indexer_compress_ratio == 0,
            f"indexer_budget = {c.indexer_budget} is not a multiple of "
            f"indexer_compress_ratio = {c.indexer_compress_ratio}",
        ),
        (
            c.indexer_budget <= MAX_SIZE,  # reading bounds it too, --indexer-budget does not
            f"indexer_budget = {c.indexer_budget} is outside 1 … {MAX_SIZE}",
        ),
        (
            c.rotary_dim >= 2 and c.rotary_dim % 2 == 0,
            f"head_dim = {c.head_dim} x partial_rotary_factor = {c.rope.partial_rotary_factor} gives "
            f"{c.rotary_dim} rotary columns; an even number of at least 2 is needed",
        ),
        (
            c.rotary_dim <= c.indexer_head_dim,
            f"{c.rotary_dim} rotary columns do not fit indexer_head_dim = {c.indexer_head_dim}",
        ),
        (not c.attention_bias, "attention_bias = true is not part of this model"),
        (
            all(e < c.vocab_size for e in c.eos_token_id),
            f"eos_token_id = {list(c.eos_token_id)} exceeds the vocabulary",
        ),
    ]
    if c.ple_layer_ids:
        checks += [
            (bool(c.eos_token_id), "eos_token_id is missing; the n-gram history restarts at it"),
            (
                c.ple_embed_dim % c.ngram_heads == 0,
                f"ple_embed_dim = {c.ple_embed_dim} is not a multiple of {c.ngram_heads} n-gram heads",
            ),
            (
                all(c.layer_types[i] == LINEAR_ATTENTION for i in c.ngram_layers if i < len(c.layer_types)),
                f"ple_layer_ids = {list(c.ple_layer_ids)} names a layer that is not linear_attention",
            ),
        ]
    return [message for ok, message in checks if not ok]
