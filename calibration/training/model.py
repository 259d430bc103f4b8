"""The model in the form that training needs: whole sequences, batched, differentiable, without states.

Parameters live in the modules of `flashnext.export.model.layers`, so names and shapes are the checkpoint's; what the
graphs take as inputs (embedding, LM head, experts, n-gram table) is added under the checkpoint's names. Only the way
of computing is another one. The tests hold it against the graphs of the export.

    model = TrainingModel(config)
    initialize(model, seed=0)
    out = model(tokens, mode="dense")        # tokens [B, T]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.calibration.training.attention import Attended, Mode, sparse_attention
from flashnext.calibration.training.delta_rule import gated_delta_net
from flashnext.calibration.training.experts import Experts, sparse_moe
from flashnext.calibration.training.gated_residual import Flow, advance
from flashnext.calibration.training.ngrams import NgramTable, inject
from flashnext.export.config import ModelConfig
from flashnext.export.model import layers
from flashnext.export.model.graphs import MtpLayers
from flashnext.export.model.rope import rotary_frequencies
from flashnext.export.ops.reference.gated_residual import write

CHECKPOINT_FORM = "select_return"


@dataclass
class Trace:
    """What a pass collects on its way, a list entry for each layer in order (the draft layer's last)."""

    attended: list[Attended] = field(default_factory=list)
    write_gates: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    expert_share: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    """Branches before each layer's last write: their gradients show how each branch learns."""


@dataclass
class Output:
    """Results of a pass over tokens [B, T]."""

    hidden: Tensor
    """[B, T, H] the LM head's input"""
    draft_hidden: Tensor | None
    """[B, T - 1, H] the LM head's input for the draft layer: position t predicts token t + 2"""
    trace: Trace


class TrainingModel(nn.Module):
    """Backbone and draft layer; state dict keys are the checkpoint's names (n-gram table whole, experts fused)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        inv_freq, self.rope_scale = rotary_frequencies(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.embed_tokens = layers.Weight(config.vocab_size, config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = layers.Weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self._layer(i) for i in range(config.num_hidden_layers))
        self.hyper_connection_mixer = layers.GatedResidual(config, last=True)
        if config.has_mtp:
            self.mtp = MtpLayers(config, CHECKPOINT_FORM, self.rope_scale)
            _decoder(self.mtp.layers[0]).mlp.experts = Experts(config)

    def _layer(self, number: int) -> layers.DecoderLayer:
        c, ngram = self.config, number in self.config.ngram_layers
        layer = layers.DecoderLayer(c, c.layer_types[number], ngram, self.rope_scale)
        layer.mlp.experts = Experts(c)
        if layer.ple is not None:
            layer.ple.ple_embedding = NgramTable(c, number)
        return layer

    def forward(self, tokens: Tensor, mode: Mode = "sparse", draft: bool = True, ngrams: bool = True) -> Output:
        """Run whole sequences. `ngrams=False` replaces the n-gram rows by zeros."""
        trace = Trace()
        flow: Flow = (self._embed(tokens)[..., None, :].expand(-1, -1, self.config.hc_count, -1), None, None)
        for layer in map(_decoder, self.layers):
            if layer.ple is not None:
                table: NgramTable = layer.ple.ple_embedding  # type: ignore[assignment]
                rows = table(tokens)
                r = inject(layer.ple, _settle(flow), rows if ngrams else torch.zeros_like(rows))
                flow = (r, None, None)
            flow = self._run_layer(layer, flow, mode, trace)
            trace.residuals.append(flow[0])
        r, hidden, _ = advance(self.hyper_connection_mixer, flow)
        drafts = self._draft(r[:, :-1], tokens[:, 1:], mode, trace) if draft and self.config.has_mtp else None
        return Output(hidden, drafts, trace)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of any of an output's hidden states."""
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return functional.linear(hidden, head.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.embed_tokens.weight)

    def _run_layer(self, layer: layers.DecoderLayer, flow: Flow, mode: Mode, trace: Trace) -> Flow:
        r, x, s = self._advance(layer.attn_hyper_connection, flow, trace)
        if layer.is_sparse:
            y, attended = sparse_attention(layer.self_attn, x, self.inv_freq, mode)
            trace.attended += [attended] if attended is not None else []
        else:
            y = gated_delta_net(layer.linear_attn, x)
        r, x, s = self._advance(layer.mlp_hyper_connection, (r, y, s), trace)
        y, balance, share = sparse_moe(layer.mlp, x)
        trace.balance.append(balance)
        trace.expert_share.append(share)
        return r, y, s

    def _advance(self, module: layers.GatedResidual, flow: Flow, trace: Trace) -> tuple[Tensor, Tensor, Tensor]:
        r, x, s = advance(module, flow)
        trace.write_gates.append(s.detach())
        return r, x, s

    def _draft(self, r: Tensor, following: Tensor, mode: Mode, trace: Trace) -> Tensor:
        """The draft layer on pairs (branches after position t, token t + 1)."""
        m, eps = self.mtp, self.config.rms_norm_eps
        embedding = layers.plain_rms_norm(self._embed(following), m.pre_fc_norm_embedding.weight, eps)
        normed = layers.plain_rms_norm(r.flatten(-2), m.pre_fc_norm_hidden.weight, eps).unflatten(-1, r.shape[-2:])
        state = m.fc_hidden(normed) + m.fc_embedding(embedding)[..., None, :]
        flow = self._run_layer(_decoder(m.layers[0]), (state, None, None), mode, trace)
        return advance(m.hyper_connection_mixer, flow)[1]


def _decoder(module: nn.Module) -> layers.DecoderLayer:
    assert isinstance(module, layers.DecoderLayer)
    return module


def _settle(flow: Flow) -> Tensor:
    r, y, s = flow
    return r if y is None or s is None else write(r, y, s)
