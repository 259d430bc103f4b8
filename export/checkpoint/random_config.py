"""Configuration of the small random checkpoints: every mechanism of the official model, at toy sizes.

Eight layers, two of them QSA, with an indexer budget (32 tokens) that a short prompt already exceeds, so that block
selection is at work; an n-gram table of a few thousand rows; an eos (document separator) that is not the turn's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashnext.export.checkpoint import random_tokenizer
from flashnext.export.config import ModelConfig

DEFAULT_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "output_gate_type": "sigmoid",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "mamba_ssm_dtype": "float32",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 500,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 4,
    "seed": 1234,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "eos_token_id": random_tokenizer.END_OF_TEXT,
    "bos_token_id": random_tokenizer.END_OF_TEXT,
    "pad_token_id": random_tokenizer.END_OF_TEXT,
    "use_cache": True,
    "tie_word_embeddings": False,
}
VISION_CONFIG: dict[str, Any] = {
    "model_type": "qwen4_exp_vision",
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}


def full_config(config: Mapping[str, Any] | ModelConfig | None = None) -> dict[str, Any]:
    """A config.json in the official, nested form."""
    fields = config.to_dict() if isinstance(config, ModelConfig) else dict(config or {})
    text = {**DEFAULT_TEXT_CONFIG, **fields.get("text_config", fields)}
    text["model_type"] = DEFAULT_TEXT_CONFIG["model_type"]
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {**VISION_CONFIG, "out_hidden_size": text["hidden_size"]},
    }
