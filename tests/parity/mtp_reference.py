"""An independent reference of the MTP (draft) layer: plain formulas, one position at a time, nothing of our model.

    e    = fc_embedding(RMSNorm(embed(token t + 1)))
    R_i  = fc_hidden(RMSNorm over the whole n*H vector of the state after position t)_i + e
    R    = one QSA decoder layer (Gated Residual, attention, Gated Residual, MoE) at position t
    x    = the layer's own final Gated Residual of R; logits of token t + 2 = LM head(x)

A `Draft` is the list of pairs (state, token) fed so far; everything is computed from it anew each time, so there is no
cache that could go wrong. Weights come by their checkpoint names, rotary frequencies and LM head from the oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu, softmax

from .oracle import Oracle


@dataclass(frozen=True)
class Given:
    """Blocks chosen by an earlier position, when `seen` tokens were there."""

    blocks: list[int]
    seen: int


@dataclass(frozen=True)
class DraftOutput:
    """Of each position: logits [T, vocab], the layer's own state [T, n, H], chosen blocks best first."""

    logits: Tensor
    hidden: Tensor
    blocks: list[list[int]]


class MtpReference:
    """The layer of one checkpoint."""

    def __init__(self, oracle: Oracle) -> None:
        self.c = oracle.case.text
        self.w = {name.removeprefix("mtp."): tensor for name, tensor in oracle.mtp.items()}
        self.embed_tokens = oracle.text_model.embed_tokens.weight.detach()
        self.lm_head = oracle.model.lm_head.weight.detach()
        rotary = oracle.text_model.rotary_emb
        self.inv_freq, self.rope_scale = rotary.inv_freq, rotary.attention_scaling
        self.eps, self.n = 1e-6, self.c["hc_count"]

    @torch.no_grad()
    def run(self, hidden: Tensor, tokens: list[int], given: dict[int, Given] | None = None) -> DraftOutput:
        """All positions: `hidden` [T, n, H] after position t, `tokens` [T] at t + 1. `given` fixes block choices."""
        e = self.linear("fc_embedding", self.norm(embedding(torch.tensor(tokens), self.embed_tokens), "embedding"))
        whole = self.norm(hidden.flatten(1), "hidden").view_as(hidden)
        r = self.linear("fc_hidden", whole) + e[:, None]
        x, s = self.read(r, "layers.0.attn_hyper_connection")
        y, blocks = self.attention(x, given or {})
        r = r + s[..., None] * y[:, None]
        x, s = self.read(r, "layers.0.mlp_hyper_connection")
        r = r + s[..., None] * self.experts(x)[:, None]
        x, _ = self.read(r, "hyper_connection_mixer")
        return DraftOutput(linear(x, self.lm_head), r, blocks)

    # --- parts ------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.w[f"{name}.weight"])

    def norm(self, x: Tensor, which: str) -> Tensor:
        return self.rms_norm(x, self.w[f"pre_fc_norm_{which}.weight"])

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + weight)

    def read(self, r: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Gated Residual: block input x [T, H] and write gates s [T, n] (ones where the mixer has none)."""
        gamma = self.w[f"{name}.hc_norm.weight"].view(self.n, -1)
        normed = torch.stack([self.rms_norm(r[:, i], gamma[i]) for i in range(self.n)], dim=1)
        flat = normed.flatten(1)
        low = silu(self.linear(f"{name}.input_mix_weight_down", flat) / self.n)
        gate = torch.sigmoid(self.linear(f"{name}.input_mix_weight_up", low)).view_as(normed)
        x = (gate * normed).sum(1) / self.n
        if f"{name}.block_inject_weight.weight" not in self.w:
            return x, torch.ones(len(r), self.n)
        return x, 2 * torch.sigmoid(self.linear(f"{name}.block_inject_weight", flat) / self.n)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """RoPE on the first columns of x [..., D]: column i turns with column i + half."""
        half = len(self.inv_freq)
        cos, sin = (f(position * self.inv_freq) * self.rope_scale for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], dim=-1)

    def attention(self, x: Tensor, given: dict[int, Given]) -> tuple[Tensor, list[list[int]]]:
        heads, kv, dim, r = (
            self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim", "indexer_compress_ratio")
        )
        name, steps = "layers.0.self_attn", len(x)
        query, gate = self.linear(f"{name}.q_proj", x).view(steps, heads, 2, dim).unbind(2)
        query = self.rms_norm(query, self.w[f"{name}.q_norm.weight"])
        key = self.rms_norm(self.linear(f"{name}.k_proj", x).view(steps, kv, dim), self.w[f"{name}.k_norm.weight"])
        value = self.linear(f"{name}.v_proj", x).view(steps, kv, dim)
        query = torch.stack([self.rotate(query[t], t) for t in range(steps)])
        key = torch.stack([self.rotate(key[t], t) for t in range(steps)])
        out, chosen = torch.zeros(steps, heads, dim), []
        for t in range(steps):
            fixed = given.get(t)
            blocks = self.choose(x, t) if fixed is None else fixed.blocks
            tail = range(((t + 1 if fixed is None else fixed.seen) // r) * r, t + 1)
            seen = sorted({b * r + i for b in blocks for i in range(r)} | set(tail))
            for h in range(heads):
                k, v = (z[seen, h * kv // heads] for z in (key, value))
                out[t, h] = softmax(k @ query[t, h] / math.sqrt(dim), dim=0) @ v
            chosen.append(blocks)
        return self.linear(f"{name}.o_proj", (out * torch.sigmoid(gate)).flatten(1)), chosen

    def choose(self, x: Tensor, t: int) -> list[int]:
        """The indexer: the best complete blocks at position t, ties to the lower block."""
        heads, dim, r = (self.c[k] for k in ("indexer_n_heads", "indexer_head_dim", "indexer_compress_ratio"))
        name = "layers.0.self_attn.indexer"
        projected = self.linear(f"{name}.index_qk_proj", x[: t + 1]).view(t + 1, heads + 1, dim)
        query = self.rotate(self.rms_norm(projected[t, :heads], self.w[f"{name}.q_layernorm.weight"]), t)
        scores = []
        for b in range((t + 1) // r):
            pooled = projected[b * r : b * r + r, heads].sum(0) / r
            key = self.rotate(self.rms_norm(pooled, self.w[f"{name}.k_layernorm.weight"]), b * r)
            scores.append(float(torch.relu(query @ key).sum()) / math.sqrt(dim))
        best = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
        return best[: self.c["indexer_budget"] // r]

    def experts(self, x: Tensor) -> Tensor:
        name, top_k = "layers.0.mlp", self.c["num_experts_per_tok"]
        probabilities = softmax(self.linear(f"{name}.gate", x), dim=-1)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            best = sorted(range(self.c["num_experts"]), key=lambda e: (-float(probabilities[t, e]), e))[:top_k]
            total = float(probabilities[t, best].sum()) if self.c["norm_topk_prob"] else 1.0
            for e in best:
                gate, up = (self.w[f"{name}.experts.gate_up_proj"][e] @ x[t]).chunk(2)
                product = self.w[f"{name}.experts.down_proj"][e] @ (silu(gate) * up)
                out[t] += probabilities[t, e] / total * product
        shared = silu(self.linear(f"{name}.shared_expert.gate_proj", x)) * self.linear(
            f"{name}.shared_expert.up_proj", x
        )
        shared = self.linear(f"{name}.shared_expert.down_proj", shared)
        return out + torch.sigmoid(self.linear(f"{name}.shared_expert_gate", x)) * shared
