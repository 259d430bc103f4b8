"""Configuration of the small model that ships: every mechanism of the official one, below 10 MB in BF16.

The indexer's budget is a quarter of a training window, so that block choice decides what is seen there; the n-gram
table is small beside the official one, but as large beside its model.
"""

from __future__ import annotations

from typing import Any

from flashnext.export.checkpoint.random_config import full_config

VOCABULARY = 4096
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(VOCABULARY - len(SPECIALS), VOCABULARY)

SMALL_TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "hc_lowrank": 12,
    "indexer_n_heads": 4,
    "indexer_head_dim": 16,
    "indexer_budget": 128,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "ple_embed_dim": 96,
    "ngram_vocab_size_base": 12000,
    "split_ngram_parts": 4,
    "eos_token_id": END_OF_TEXT,
    "bos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}


def small_config() -> dict[str, Any]:
    """config.json of the small model, in the official nested form."""
    return full_config(SMALL_TEXT_CONFIG)
