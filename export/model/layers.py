"""The layers of the model over the custom ops of `flashnext.export.ops`.

Parameters carry the checkpoint's names, so a layer's state dict keys are the checkpoint's. Embedding, LM head and
expert weights are not parameters: graphs take them as inputs (`Step.weights`). What a sequence remembers comes and
goes through `Step.states`.

Between blocks the residual branches travel as a `Flow`: the write of one block is pending until the next op reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.export.config import SPARSE_ATTENTION, ModelConfig
from flashnext.export.graphs.experts import form_of, input_names
from flashnext.export.kv_cache import Scales
from flashnext.export.model.residual import Branches, LayerStores, ResidualStore
from flashnext.export.ops.torch_ops import call


@dataclass
class Flow:
    """The residual between two blocks: the branches r, with y and s still to be written; or the embedding alone."""

    r: Branches | None = None
    y: Tensor | None = None
    s: Tensor | None = None
    embedding: Tensor | None = None
    start: Tensor | None = None
    """Branches that are not stored yet, in place of r; only where branches are kept in FP8."""

    def form(self) -> tuple[str, list[Branches]]:
        """Name of the op form for this flow, and its first inputs."""
        if self.embedding is not None:
            return "embed", [self.embedding]
        if self.start is not None:
            return "start", [self.start]
        assert self.r is not None
        if self.y is None:
            return "settled", [self.r]
        assert self.s is not None
        return "pending", [self.r, self.y, self.s]


@dataclass
class Step:
    """What a step brings to every layer. New states are collected in `states_out` under their input's name."""

    slots: Tensor
    past_len: Tensor
    new_len: Tensor
    accepted: Tensor | None
    states: dict[str, Tensor]
    weights: dict[str, Tensor]
    inv_freq: Tensor
    ngram_rows: dict[int, Tensor] = field(default_factory=dict)
    blocks: Tensor | None = None
    blocks_len: Tensor | None = None
    states_out: dict[str, Tensor] = field(default_factory=dict)
    blocks_out: Tensor | None = None

    def given_blocks(self) -> list[Tensor]:
        return [t for t in (self.blocks, self.blocks_len) if t is not None]

    def state(self, prefix: str, *names: str) -> list[Tensor]:
        return [self.states[f"{prefix}.{n}"] for n in names]

    def keep(self, prefix: str, names: tuple[str, ...], values: Any) -> None:
        self.states_out.update({f"{prefix}.{n}": v for n, v in zip(names, values, strict=True)})


class Weight(nn.Module):
    """A bare `weight` parameter (norms, convolutions)."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Linear(nn.Linear):
    """Linear layer without bias whose weight may be stored in another dtype than the activations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class GatedResidual(nn.Module):
    """Writes what is pending and reads the next block's input; without write gates of its own when `last`."""

    def __init__(self, c: ModelConfig, last: bool = False, store: ResidualStore | None = None) -> None:
        super().__init__()
        width = c.hc_count * c.hidden_size
        self.hc_norm = Weight(width)
        self.input_mix_weight_down = Linear(width, c.hc_lowrank)
        self.input_mix_weight_up = Linear(c.hc_lowrank, width)
        self.block_inject_weight = None if last else Linear(width, c.hc_count)
        self.store = store or ResidualStore()
        self.attributes = {"branches": c.hc_count, "eps": c.rms_norm_eps}

    def _weights(self, dtype: torch.dtype) -> list[Tensor]:
        modules = [self.hc_norm, self.input_mix_weight_down, self.input_mix_weight_up, self.block_inject_weight]
        return [m.weight.to(dtype) for m in modules if m is not None]

    def forward(self, flow: Flow) -> tuple[Branches, Tensor, Tensor]:
        """Branches r, block input x and write gates s."""
        form, inputs = flow.form()
        out = self._call(form, inputs)
        return (inputs[0], *out) if form == "settled" else out

    def finish(self, flow: Flow) -> tuple[Branches, Tensor]:
        """The final Gated Residual: branches r after the last write, and the LM head's input x."""
        out: tuple[Branches, Tensor] = self._call("last", flow.form()[1])
        return out

    def _call(self, form: str, inputs: list[Branches]) -> Any:
        weights = self._weights(inputs[0].dtype)
        return self.store.call("GatedResidual", form, inputs, *weights, **self.attributes)


class GatedDeltaNet(nn.Module):
    """Linear attention: projections around the `GatedDeltaNet` op."""

    STATES = ("conv_state", "recurrent_state", "pending_state")

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        h, values = c.hidden_size, c.linear_num_value_heads
        self.in_proj_qkv = Linear(h, c.linear_conv_dim)
        self.in_proj_z = Linear(h, c.linear_value_dim)
        self.in_proj_b = Linear(h, values)
        self.in_proj_a = Linear(h, values)
        self.conv1d = Weight(c.linear_conv_dim, 1, c.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(values))
        self.dt_bias = nn.Parameter(torch.empty(values))
        self.norm = Weight(c.linear_value_head_dim)
        self.out_proj = Linear(c.linear_value_dim, h)
        self.attributes = {"eps": c.rms_norm_eps, "key_heads": c.linear_num_key_heads, "gate": c.output_gate_type}

    def forward(self, x: Tensor, step: Step, prefix: str) -> Tensor:
        projected = [p(x) for p in (self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)]
        weights = [self.conv1d.weight.to(x.dtype), self.A_log.float(), self.dt_bias.float(), self.norm.weight.float()]
        assert step.accepted is not None
        lengths = [step.slots, step.past_len, step.accepted, step.new_len]
        states = step.state(prefix, *self.STATES)
        y, *new = call("GatedDeltaNet", "default", *projected, *weights, *lengths, *states, **self.attributes)
        step.keep(prefix, self.STATES, new)
        return self.out_proj(y)


class Indexer(nn.Module):
    """Parameters of the block chooser."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.index_qk_proj = Linear(c.hidden_size, (c.indexer_n_heads + 1) * c.indexer_head_dim)
        self.q_layernorm = Weight(c.indexer_head_dim)
        self.k_layernorm = Weight(c.indexer_head_dim)


class SparseAttention(nn.Module):
    """Qwen Sparse Attention: projections around the `SparseAttention` op; `form` says where blocks come from.

    With `cache_scales` (of keys and values) the caches are E4M3 codes.
    """

    KV_STATES = ("key_state", "value_state")
    INDEX_STATES = ("index_tail_state", "index_key_state")

    def __init__(self, c: ModelConfig, form: str, rope_scale: float, cache_scales: Scales | None = None) -> None:
        super().__init__()
        self.form = form
        self.has_codes = cache_scales is not None
        if cache_scales is not None:
            # On the CPU even while the rest is built without memory, as scales of the residual are.
            keys, values = (torch.tensor([s], dtype=torch.float32, device="cpu") for s in cache_scales)
            self.k_scale, self.v_scale = (nn.Buffer(s, persistent=False) for s in (keys, values))
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim * 2)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = Weight(c.head_dim), Weight(c.head_dim)
        if form != "given":
            self.indexer = Indexer(c)
        self.attributes = {
            "eps": c.rms_norm_eps,
            "heads": c.num_attention_heads,
            "kv_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "index_heads": c.indexer_n_heads,
            "index_head_dim": c.indexer_head_dim,
            "block": c.indexer_compress_ratio,
            "budget_blocks": c.budget_blocks,
            "rope_scale": rope_scale,
        }

    def forward(self, x: Tensor, step: Step, prefix: str) -> Tensor:
        inputs = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        norms = [self.q_norm, self.k_norm]
        names: tuple[str, ...] = self.KV_STATES
        if self.form != "given":
            inputs.append(self.indexer.index_qk_proj(x))
            norms += [self.indexer.q_layernorm, self.indexer.k_layernorm]
            names += self.INDEX_STATES
        inputs += [*(n.weight.to(x.dtype) for n in norms), step.inv_freq, step.slots, step.past_len, step.new_len]
        inputs += step.state(prefix, *names)
        if self.form == "given":
            inputs += step.given_blocks()
        if self.has_codes:
            inputs += [self.k_scale, self.v_scale]
        form = f"{self.form}_fp8_cache" if self.has_codes else self.form
        y, *rest = call("SparseAttention", form, *inputs, **self.attributes)
        if self.form == "select_return":
            step.blocks_out = rest.pop()
        step.keep(prefix, names, rest)
        return self.o_proj(y)


class SharedExpert(nn.Module):
    """The expert that every token uses."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.shared_expert_intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.shared_expert_intermediate_size)
        self.down_proj = Linear(c.shared_expert_intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoE(nn.Module):
    """Routed experts (the `SparseMoE` op, in the form of the weights in `Step.weights`) and the gated shared expert."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(c.hidden_size, c.num_experts)
        self.shared_expert = SharedExpert(c)
        self.shared_expert_gate = Linear(c.hidden_size, 1)
        self.attributes = {"top_k": c.num_experts_per_tok, "normalize": int(c.norm_topk_prob)}

    def forward(self, x: Tensor, step: Step, prefix: str) -> Tensor:
        form = form_of(step.weights, prefix)
        experts = [step.weights[name] for name in input_names(form, prefix)]
        routed: Tensor = call("SparseMoE", form, x, self.gate(x), *experts, **self.attributes)
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class NgramInjection(nn.Module):
    """Projections of the n-gram rows and the `NgramInjection` op."""

    def __init__(self, c: ModelConfig, store: ResidualStore | None = None) -> None:
        super().__init__()
        width = c.hc_count * c.hidden_size
        self.store = store or ResidualStore()
        self.key_proj = Linear(c.ple_embed_dim, width)
        self.value_proj = Linear(c.ple_embed_dim, c.hidden_size)
        self.norm_key, self.norm_query, self.norm_conv = Weight(width), Weight(width), Weight(width)
        self.conv1d = Weight(width, 1, c.ple_conv_kernel_size)
        self.attributes = {"branches": c.hc_count, "eps": c.rms_norm_eps, "dilation": c.ngram_size}

    def forward(self, flow: Flow, rows: Tensor, step: Step, prefix: str) -> Flow:
        form, inputs = flow.form()
        weights = [m.weight.to(rows.dtype) for m in (self.norm_key, self.norm_query, self.norm_conv, self.conv1d)]
        others = [self.key_proj(rows), self.value_proj(rows), *weights, step.slots, step.past_len, step.new_len]
        others += step.state(prefix, "conv_state")
        r, state = self.store.call("NgramInjection", form, inputs, *others, **self.attributes)
        step.keep(prefix, ("conv_state",), [state])
        return Flow(r=r)


class DecoderLayer(nn.Module):
    """N-gram injection (some layers), token mixer, MoE; a Gated Residual before each of the latter two."""

    def __init__(
        self,
        c: ModelConfig,
        layer_type: str,
        ngram: bool,
        rope_scale: float,
        attention_form: str = "select",
        stores: LayerStores | None = None,
        cache_scales: Scales | None = None,
    ) -> None:
        super().__init__()
        stores = stores or LayerStores(ResidualStore(), ResidualStore(), ResidualStore())
        self.ple = NgramInjection(c, stores.ngram) if ngram else None
        self.attn_hyper_connection = GatedResidual(c, store=stores.before)
        if layer_type == SPARSE_ATTENTION:
            self.self_attn = SparseAttention(c, attention_form, rope_scale, cache_scales)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp_hyper_connection = GatedResidual(c, store=stores.mixer)
        self.mlp = SparseMoE(c)
        self.is_sparse = layer_type == SPARSE_ATTENTION

    def forward(self, flow: Flow, step: Step, prefix: str) -> Flow:
        if self.ple is not None:
            layer = int(prefix.rsplit(".", 1)[1])
            flow = self.ple(flow, step.ngram_rows[layer], step, f"{prefix}.ple")
        r, x, s = self.attn_hyper_connection(flow)
        mixer = self.self_attn if self.is_sparse else self.linear_attn
        r, x, s = self.mlp_hyper_connection(Flow(r, mixer(x, step, prefix), s))
        return Flow(r, self.mlp(x, step, prefix), s)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm in plain operators (where no custom op does it)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)
