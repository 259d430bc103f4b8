"""Small named configurations that, between them, vary everything a checkpoint may vary.

Each is a few differences from `BASE`, a model of the official pattern (three GDN layers, then QSA; n-gram rows at
layer 2; one MTP layer) in which nothing is trivial: head dimensions differ from one another, the budget is far below
the longest text, and texts hold eos in many places. The comment at each says which part it is there for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EOS = 7

BASE: dict[str, Any] = dict(
    vocab_size=199,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=24,
    norm_topk_prob=True,
    output_gate_type="sigmoid",
    hc_count=4,
    hc_lowrank=8,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=12,
    indexer_budget=64,
    indexer_compress_ratio=4,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    max_position_embeddings=1024,
    ple_layer_ids=[2],
    ple_conv_kernel_size=4,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=101,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=4,
    eos_token_id=EOS,
    bos_token_id=EOS,
    pad_token_id=None,
    tie_word_embeddings=False,
    mtp_num_hidden_layers=1,
)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 4.0}


@dataclass(frozen=True)
class Case:
    """One checkpoint: its text configuration (differences from BASE) and how it is written.

    `nested` writes a multimodal checkpoint (text_config, model.language_model.*, model.visual.*); `per_expert` writes
    one tensor per expert instead of the fused ones.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    per_expert: bool = False
    seed: int = 0

    @property
    def text(self) -> dict[str, Any]:
        return BASE | self.changes

    @property
    def eos(self) -> int:
        eos = self.text["eos_token_id"]
        return eos[0] if isinstance(eos, list) else eos

    @property
    def has_mtp(self) -> bool:
        return bool(self.text["mtp_num_hidden_layers"])

    def __hash__(self) -> int:
        return hash(self.name)


def _layers(pattern: str) -> dict[str, Any]:
    """`_layers("GGQ")`: two GDN layers, then a QSA layer, in the spelling of official checkpoints."""
    names = {"G": "linear_attention", "Q": "full_attention"}
    return {"num_hidden_layers": len(pattern), "layer_types": [names[c] for c in pattern]}


CASES = (
    # the official shape in small: nested configuration, fused experts
    Case("official", _layers("GGGQ"), nested=True),
    # eight layers, two branches, widths of their own; no MTP layer
    Case(
        "deep",
        {
            **_layers("GGGQGGGQ"),
            "hc_count": 2,
            "hidden_size": 48,
            "hc_lowrank": 6,
            "mtp_num_hidden_layers": 0,
        },
        per_expert=True,
    ),
    # GDN alone: no attention layer, no n-gram layer; silu gate; one value head for each key head
    Case(
        "gdn_only",
        {**_layers("GG"), "ple_layer_ids": [], "output_gate_type": "silu", "linear_num_key_heads": 4},
        per_expert=True,
    ),
    # QSA alone: no n-gram layer; one KV head; block size 2 and a budget of 8 tokens
    Case(
        "qsa_only",
        {
            **_layers("QQ"),
            "ple_layer_ids": [],
            "num_key_value_heads": 1,
            "indexer_compress_ratio": 2,
            "indexer_budget": 8,
        },
    ),
    # every query head has a KV head of its own; block size 8; one index head, so half of all scores tie at zero
    Case(
        "block_8",
        {
            **_layers("GQGQ"),
            "ple_layer_ids": [3],
            "num_key_value_heads": 4,
            "indexer_compress_ratio": 8,
            "indexer_n_heads": 1,
        },
    ),
    # the budget exceeds every text: selection is on, its result is dense attention
    Case("budget_above_length", {**_layers("GGQ"), "indexer_budget": 1024, "hc_count": 2}),
    # three value heads for each key head, silu, convolutions of width 3
    Case(
        "gdn_ratio_3",
        {
            **_layers("GGQ"),
            "linear_num_value_heads": 6,
            "output_gate_type": "silu",
            "linear_conv_kernel_dim": 3,
            "ple_conv_kernel_size": 3,
            "mtp_num_hidden_layers": 0,
        },
        nested=True,
    ),
    # one value head for each key head, convolutions of width 2
    Case(
        "narrow_convs",
        {
            **_layers("GGQ"),
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "ple_conv_kernel_size": 2,
            "mtp_num_hidden_layers": 0,
        },
    ),
    # n-grams at the very first layer: nothing runs before the rows are needed
    Case("ngram_first", {**_layers("GQG"), "ple_layer_ids": [1], "ngram_size": 4, "ple_embed_dim": 24}),
    # two n-gram layers next to each other, size 4
    Case(
        "two_ngrams",
        {**_layers("GGGQ"), "ple_layer_ids": [2, 3], "ngram_size": 4, "ple_embed_dim": 24, "heads_per_ngram": 1},
        per_expert=True,
    ),
    # two n-gram layers apart, size 3, one shard; the last layer is GDN
    Case("ngrams_apart", {**_layers("GGQG"), "ple_layer_ids": [1, 4], "split_ngram_parts": 1, "hc_count": 2}),
    # a list of eos tokens: the n-gram history restarts at the first one only
    Case("eos_list", {**_layers("GGQ"), "eos_token_id": [11, EOS], "num_attention_heads": 6}, nested=True),
    # YaRN with derived attention factor: the longest text passes the original context (256) nearly three times
    Case("yarn", {**_layers("GGGQ"), "rope_parameters": {**YARN, "original_max_position_embeddings": 256}}),
    # YaRN with everything said explicitly, on a narrow rotary part
    Case(
        "yarn_explicit",
        {
            **_layers("QGQ"),
            "ple_layer_ids": [2],
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "partial_rotary_factor": 0.25,
                "original_max_position_embeddings": 128,
                "factor": 8.0,
                "attention_factor": 1.3,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "truncate": False,
            },
        },
    ),
    # every expert of every token
    Case("all_experts", {**_layers("GGQ"), "num_experts": 4, "num_experts_per_tok": 4, "hidden_size": 64}),
    # tied embeddings, router weights that do not sum to one, no MTP layer
    Case(
        "tied",
        {
            **_layers("GGQ"),
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "mtp_num_hidden_layers": 0,
        },
        nested=True,
        per_expert=True,
    ),
)

BY_NAME = {case.name: case for case in CASES}
