"""The oracle: transformers' own model with random weights, and the checkpoint it is saved as.

The weights are large enough that everything matters: gates spread over their range, attention and router are far from
uniform, norm weights far from zero, decays between forgetting at once and never. `test_oracle.py` holds this module to
that. The checkpoint has the layout of the official ones (n-gram shards, `mtp.*` beside the model, an index file).

Transformers breaks ties between equal block scores arbitrarily (`topk`), and exact zeros are common; here the choice is
a stable descending sort, so that ties go to the lower block.

Block choice and routing are decisions: where two candidates are closer than float32 rounding, two right programs answer
differently, and no tolerance on logits helps. The n-gram gate is one too: sgn(d) sqrt(|d|) jumps at 0 and is steep
beside it. `Oracle.text` therefore makes texts on which every decision is clear.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from .configs import Case

Array = NDArray[np.float32]

VISION = dict(
    depth=1,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    patch_size=4,
    temporal_patch_size=2,
    spatial_merge_size=2,
    num_position_embeddings=16,
)
SHARD_COUNT = 3

CLEAR = 2e-5
"""A choice is clear when chosen and left-out candidates differ by this much, relative to the best one: some twenty
times the rounding noise of float32 in models of this size."""
CLEAR_GATE = 3e-4
"""An n-gram gate is clear when |d| is this large: rounding noise in d grows by at most 30 under the root."""


class Oracle:
    """Transformers' model of a case, in fp32, with the answers that the tests compare with."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case)
        self.text_model = self.model.model.language_model if case.nested else self.model.model
        self.mtp = random_mtp(case) if case.has_mtp else {}
        self.decisions = Decisions(case.text["indexer_compress_ratio"])
        self._hidden: torch.Tensor | None = None
        self.text_model.hyper_connection_mixer.register_forward_pre_hook(self._keep_hidden)
        for module in self.text_model.modules():
            if isinstance(module, theirs.Qwen4ExpTextTopKRouter):
                module.register_forward_hook(self.decisions.routed)
            if isinstance(module, theirs.Qwen4ExpTextPLELayer):
                module.register_forward_hook(self.decisions.gated)

    def _keep_hidden(self, _: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        self._hidden = args[0]

    def text(self, length: int, seed: int = 0, eos_rate: float = 0.08) -> list[int]:
        """A random text with eos tokens inside, on which every decision is clear.

        The tokens that an unclear one hangs on are drawn again; what comes before stays as it is (the model is causal).
        """
        random = np.random.default_rng(seed)
        eos = self.case.text["eos_token_id"]
        vocabulary = range(self.case.text["vocab_size"])

        def draw() -> int:
            return int(random.choice(eos if random.random() < eos_rate else vocabulary))

        eos = eos if isinstance(eos, list) else [eos]
        tokens = [draw() for _ in range(length)]
        for _ in range(200):
            self.forward(tokens)
            unclear = self.decisions.first_unclear()
            if unclear is None:
                return tokens
            for position in range(unclear.start, min(unclear.stop, length)):
                tokens[position] = draw()
        raise AssertionError(f"{self.case.name}: no text of {length} tokens with clear decisions")

    def logits(self, tokens: list[int]) -> Array:
        """Logits [T, vocab] of a full forward without any cache."""
        return self.forward(tokens)[0]

    @torch.no_grad()
    def forward(self, tokens: list[int]) -> tuple[Array, torch.Tensor]:
        """Logits [T, vocab] and the residual branches before the final Gated Residual [T, n, H]."""
        self.decisions.clear()
        with lower_block_wins(self.decisions):
            out = self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        assert self._hidden is not None
        return out.logits[0].numpy(), self._hidden[0].unflatten(-1, (self.case.text["hc_count"], -1))

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens by transformers' own `generate`; nothing stops it early."""
        self.model.generation_config.eos_token_id = None
        # transformers cannot generate with a cache when no layer is attention
        cached = "indexed_attention" in self.text_model.config.layer_types
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=count, pad_token_id=0, use_cache=cached)
        ids = torch.tensor([prompt])
        self.decisions.clear()
        with lower_block_wins(self.decisions):
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return out[0, len(prompt) :].tolist()

    def save(self, folder: Path) -> None:
        """Write the checkpoint: `config.json`, three shards and their index."""
        folder.mkdir(parents=True)
        config = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
        write_shards(folder, official_tensors(self.case, self.model.state_dict() | self.mtp))


class Decisions:
    """How clear each decision of a forward was, in units of what counts as clear, with the positions it hangs on."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.block_choices: list[tuple[range, float]] = []
        self.others: list[tuple[range, float]] = []

    def clear(self) -> None:
        self.block_choices.clear()
        self.others.clear()

    def first_unclear(self) -> range | None:
        """The first positions whose tokens have to change, if any."""
        unclear = [positions for positions, margin in self.block_choices + self.others if margin < 1]
        return min(unclear, key=lambda positions: positions.start, default=None)

    def chose(self, scores: torch.Tensor, k: int) -> None:
        """Record a choice of k blocks, `scores` sorted. Exact zeros tie by design; any other tie is unclear.

        A query that sees this many complete blocks stands at the last one's end or up to a block further.
        """
        if k < len(scores) and scores[k - 1] > 0:
            first = self.block * len(scores) - 1
            margin = float((scores[k - 1] - scores[k]) / scores[0])
            self.block_choices.append((range(first, first + self.block), margin / CLEAR))

    def routed(self, router: Any, _: Any, out: tuple[torch.Tensor, ...]) -> None:
        """Forward hook of a router: the probability of the last chosen expert against the first left out."""
        if router.top_k < router.num_experts:
            best = out[0].float().softmax(-1).sort(-1, descending=True).values
            self._each((best[:, router.top_k - 1] - best[:, router.top_k]) / best[:, 0] / CLEAR)

    def gated(self, ple: Any, args: tuple[Any, ...], _: torch.Tensor) -> None:
        """Forward hook of an n-gram layer (full forwards only): the smallest |d| of the branches."""
        hidden, tokens, cache = args
        if cache is None:
            branches = (ple.hc_count, ple.hidden_size)
            key = ple.norm_key(ple.key_proj(ple.ple_embedding(tokens, None))).unflatten(-1, branches)
            d = (key * ple.norm_query(hidden).unflatten(-1, branches)).sum(-1) / math.sqrt(ple.hidden_size)
            self._each(d[0].abs().amin(-1) / CLEAR_GATE)

    def _each(self, margins: torch.Tensor) -> None:
        self.others += [(range(i, i + 1), margin) for i, margin in enumerate(margins.tolist())]


@contextlib.contextmanager
def lower_block_wins(decisions: Decisions | None = None) -> Iterator[None]:
    """Replace `topk` on 1-D tensors (only the indexer has these) by a stable descending sort."""
    original = torch.Tensor.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
        if scores.dim() != 1:
            return original(scores, k, dim, **kwargs)
        values, indices = scores.sort(descending=True, stable=True)
        if decisions is not None:
            decisions.chose(values, k)
        return torch.return_types.topk((values[:k], indices[:k]))

    torch.Tensor.topk = topk  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]


# --- building ------------------------------


def build(case: Case) -> Any:
    """Transformers' model of the case with large random weights."""
    text = transformers.Qwen4ExpTextConfig(**case.text)
    if case.nested:
        vision = VISION | {"out_hidden_size": text.hidden_size}
        config = transformers.Qwen4ExpConfig(
            text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=text.tie_word_embeddings
        )
        model = theirs.Qwen4ExpForConditionalGeneration._from_config(config, attn_implementation="eager")
    else:
        model = theirs.Qwen4ExpForCausalLM._from_config(text, attn_implementation="eager")
    model = model.float().eval()
    generator = torch.Generator().manual_seed(1000 + case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weight(name, parameter.shape, case, generator))
    return model


def random_weight(name: str, shape: torch.Size, case: Case, generator: torch.Generator) -> torch.Tensor:
    """A random tensor whose scale makes the part it belongs to matter."""

    def normal(std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std + mean

    def spread(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "A_log":  # with dt_bias: decays per token from 0.3 to 0.999
        return spread(0.02, 0.8).log()
    if leaf == "dt_bias":
        return normal(1.0)
    if name.endswith("linear_attn.norm.weight"):
        return normal(0.5, mean=1.0)
    if "norm" in leaf:
        return normal(0.4)
    if leaf in ("embed_tokens", "ngram_embedding"):
        # a tied head would answer every token with itself if the embedding outweighed what the layers add
        return normal(0.1 if case.text["tie_word_embeddings"] and leaf == "embed_tokens" else 1.0)
    if leaf == "conv1d":
        return normal(0.6)
    fan_in = shape[-1]
    gain = {
        "input_mix_weight_down": 1.5 * case.text["hc_count"],  # the model divides by the branches
        "block_inject_weight": 1.2 * case.text["hc_count"],
        "input_mix_weight_up": 1.5,
        "gate": 2.0,  # the router
        "in_proj_a": 1.5,
        "in_proj_b": 1.5,
        "shared_expert_gate": 1.5,
        "key_proj": 2.0,
        "gate_up_proj": 1.5,
        "down_proj": 1.5,
    }.get(leaf, 1.2)
    return normal(gain / math.sqrt(fan_in))


# --- the checkpoint ------------------------------


def official_tensors(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors by their names in official checkpoints (fused experts, or one tensor per expert)."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and case.text["tie_word_embeddings"]:
            continue
        elif name.endswith("ngram_embedding.weight"):
            out |= {
                name.replace("weight", f"shard_{k}.weight"): shard
                for k, shard in enumerate(tensor.chunk(case.text["split_ngram_parts"]))
            }
        elif case.per_expert and ".experts." in name:
            out |= split_experts(name, tensor)
        else:
            out[name] = tensor
    return out


def split_experts(name: str, fused: torch.Tensor) -> dict[str, torch.Tensor]:
    """`experts.gate_up_proj` [E, 2I, H] -> `experts.{e}.gate_proj.weight`, `experts.{e}.up_proj.weight`."""
    prefix, leaf = name.rsplit(".", 1)
    if leaf == "down_proj":
        return {f"{prefix}.{e}.down_proj.weight": w for e, w in enumerate(fused)}
    halves = {"gate_proj": 0, "up_proj": 1}
    return {f"{prefix}.{e}.{half}.weight": w.chunk(2)[i] for e, w in enumerate(fused) for half, i in halves.items()}


def random_mtp(case: Case) -> dict[str, torch.Tensor]:
    """Tensors of the MTP layer, `mtp.*`, experts fused; transformers has no such module and ignores them."""
    c = case.text
    n, hidden, rank = c["hc_count"], c["hidden_size"], c["hc_lowrank"]
    heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    index_dim, experts, width = c["indexer_head_dim"], c["num_experts"], c["moe_intermediate_size"]
    shared = c["shared_expert_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc_embedding.weight": (hidden, hidden),
        "fc_hidden.weight": (hidden, hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (n * hidden,),
        "layers.0.self_attn.q_proj.weight": (heads * dim * 2, hidden),
        "layers.0.self_attn.k_proj.weight": (kv * dim, hidden),
        "layers.0.self_attn.v_proj.weight": (kv * dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        "layers.0.self_attn.q_norm.weight": (dim,),
        "layers.0.self_attn.k_norm.weight": (dim,),
        "layers.0.self_attn.indexer.index_qk_proj.weight": ((c["indexer_n_heads"] + 1) * index_dim, hidden),
        "layers.0.self_attn.indexer.q_layernorm.weight": (index_dim,),
        "layers.0.self_attn.indexer.k_layernorm.weight": (index_dim,),
        "layers.0.mlp.gate.weight": (experts, hidden),
        "layers.0.mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "layers.0.mlp.experts.down_proj": (experts, hidden, width),
        "layers.0.mlp.shared_expert.gate_proj.weight": (shared, hidden),
        "layers.0.mlp.shared_expert.up_proj.weight": (shared, hidden),
        "layers.0.mlp.shared_expert.down_proj.weight": (hidden, shared),
        "layers.0.mlp.shared_expert_gate.weight": (1, hidden),
    }
    for mixer in ("layers.0.attn_hyper_connection", "layers.0.mlp_hyper_connection", "hyper_connection_mixer"):
        shapes[f"{mixer}.hc_norm.weight"] = (n * hidden,)
        shapes[f"{mixer}.input_mix_weight_down.weight"] = (rank, n * hidden)
        shapes[f"{mixer}.input_mix_weight_up.weight"] = (n * hidden, rank)
        if mixer != "hyper_connection_mixer":
            shapes[f"{mixer}.block_inject_weight.weight"] = (n, n * hidden)
    generator = torch.Generator().manual_seed(2000 + case.seed)
    return {f"mtp.{k}": random_weight(k, torch.Size(s), case, generator) for k, s in shapes.items()}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Deal the tensors over the shards in turn, so that a layer's tensors lie in different files."""
    files = [f"model-{i + 1:05d}-of-{SHARD_COUNT:05d}.safetensors" for i in range(SHARD_COUNT)]
    names = list(tensors)
    for i, file in enumerate(files):
        part = {name: tensors[name].contiguous().clone() for name in names[i::SHARD_COUNT]}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {name: files[i % SHARD_COUNT] for i, name in enumerate(names)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
