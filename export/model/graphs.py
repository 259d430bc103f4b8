"""Head, body and MTP as PyTorch modules with exactly the inputs and outputs of `flashnext.export.graphs.io`.

A graph module takes and returns a dict of tensors by name. The export traces these modules; the `torch` engine runs
them. Parameter names inside a graph are the checkpoint's (prefix stripped).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flashnext.export.config import SPARSE_ATTENTION, ModelConfig
from flashnext.export.graphs.io import MTP_LAYER, BuildOptions, first_ngram_layer, graph_spec, layers_of
from flashnext.export.graphs.manifest import GraphSpec
from flashnext.export.kv_cache import Scales
from flashnext.export.model.layers import DecoderLayer, Flow, GatedResidual, Linear, Step, Weight, plain_rms_norm
from flashnext.export.model.residual import Branches, Codes, LayerStores, store_of
from flashnext.export.model.rope import rotary_frequencies
from flashnext.export.residual_scales import DRAFT_START, ResidualStorage, last_store, store_before


class Graph(nn.Module):
    """What the graphs have in common: the specification and the assembly of a `Step` from named tensors."""

    def __init__(self, config: ModelConfig, options: BuildOptions, name: str) -> None:
        super().__init__()
        self.config = config
        self.spec: GraphSpec = graph_spec(config, options, name)
        self.dtype = getattr(torch, options.dtype)
        self.residual = options.residual
        self.cache_scales = options.kv_cache.scales
        inv_freq, self.rope_scale = rotary_frequencies(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)

    def embed(self, inputs: dict[str, Tensor]) -> Tensor:
        return functional.embedding(inputs["token_ids"], inputs["embed_tokens.weight"]).to(self.dtype)

    def step(self, inputs: dict[str, Tensor]) -> Step:
        return Step(
            slots=inputs["slots"],
            past_len=inputs["past_len"],
            new_len=inputs["new_len"],
            accepted=inputs.get("accepted"),
            states={name: inputs[name] for name in self.spec.states},
            weights={name: tensor for name, tensor in inputs.items() if ".mlp.experts." in name},
            inv_freq=self.inv_freq,
            ngram_rows={int(n.split(".")[1]): t for n, t in inputs.items() if n.startswith("ngram_rows.")},
            blocks=inputs.get("blocks"),
            blocks_len=inputs.get("blocks_len"),
        )

    def outputs(self, step: Step, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The graph's outputs by name, in the specification's order."""
        values.update({self.spec.states[name]: tensor for name, tensor in step.states_out.items()})
        return {t.name: values[t.name] for t in self.spec.outputs}

    def branches(self, name: str, r: Branches | None) -> dict[str, Tensor]:
        """Outputs that hand branches on: codes and, unless they are static, scales."""
        if not isinstance(r, Codes):
            assert r is not None
            return {name: r}
        return {name: r.codes, **({f"{name}_token_scale": r.scale} if self.residual.mode == "dynamic" else {})}

    def logits(self, x: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """float32 logits of the rows that the step asks for."""
        rows = x.flatten(0, 1).index_select(0, inputs["logit_rows"])
        return functional.linear(rows, inputs["lm_head.weight"].to(x.dtype)).float()


class Backbone(Graph):
    """Head or body: a run of decoder layers. The module list is indexed by the model's own layer numbers."""

    def __init__(self, config: ModelConfig, options: BuildOptions, name: str) -> None:
        super().__init__(config, options, name)
        self.from_edge = name == "body" and first_ngram_layer(config) > 0
        self.layers = nn.ModuleDict({str(i): self._layer(i) for i in layers_of(config, name)})
        if self.from_edge:
            first = first_ngram_layer(config)
            self.edge_store = store_of(self.residual, f"layers.{first - 1}.mixer")

    def _layer(self, number: int) -> DecoderLayer:
        c, stores = self.config, LayerStores.of(self.residual, store_before(number), f"layers.{number}")
        cache = self.cache_scales.get(f"layers.{number}")
        return DecoderLayer(
            c, c.layer_types[number], number in c.ngram_layers, self.rope_scale, stores=stores, cache_scales=cache
        )

    def run_layers(self, inputs: dict[str, Tensor], step: Step) -> Flow:
        if self.from_edge:
            flow = Flow(self._handed_on(inputs), inputs["y"], inputs["s"])
        else:
            flow = Flow(embedding=self.embed(inputs))
        for number, layer in self.layers.items():
            flow = layer(flow, step, f"layers.{number}")
        return flow

    def _handed_on(self, inputs: dict[str, Tensor]) -> Branches:
        """The head's branches."""
        if not self.residual.is_fp8:
            return inputs["r"]
        scale = inputs["r_token_scale"] if self.residual.mode == "dynamic" else self.edge_store.scale
        return Codes(inputs["r"], scale, self.dtype)


class Head(Backbone):
    """Embedding and the layers before the first n-gram layer; hands over r, y, s."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        step = self.step(inputs)
        flow = self.run_layers(inputs, step)
        assert flow.y is not None
        assert flow.s is not None
        return self.outputs(step, {**self.branches("r", flow.r), "y": flow.y, "s": flow.s})


class Body(Backbone):
    """The rest of the layers, the final Gated Residual and the LM head."""

    def __init__(self, config: ModelConfig, options: BuildOptions, name: str) -> None:
        super().__init__(config, options, name)
        self.hyper_connection_mixer = GatedResidual(config, True, store_of(self.residual, last_store(config)))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        step = self.step(inputs)
        r, x = self.hyper_connection_mixer.finish(self.run_layers(inputs, step))
        return self.outputs(step, {"logits": self.logits(x, inputs), **self.branches("hidden", r)})


class MtpLayers(nn.Module):
    """The parameters under `mtp.` in the checkpoint."""

    def __init__(
        self,
        c: ModelConfig,
        form: str,
        rope_scale: float,
        residual: ResidualStorage | None = None,
        cache_scales: Scales | None = None,
    ) -> None:
        super().__init__()
        residual = residual or ResidualStorage()
        stores = LayerStores.of(residual, DRAFT_START, MTP_LAYER)
        self.pre_fc_norm_embedding = Weight(c.hidden_size)
        self.pre_fc_norm_hidden = Weight(c.hc_count * c.hidden_size)
        self.fc_embedding = Linear(c.hidden_size, c.hidden_size)
        self.fc_hidden = Linear(c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(c, SPARSE_ATTENTION, False, rope_scale, form, stores, cache_scales)])
        self.hyper_connection_mixer = GatedResidual(c, True, store_of(residual, f"{MTP_LAYER}.mlp"))


class Mtp(Graph):
    """The draft layer: (state after position t, token t + 1) gives logits of token t + 2.

    "mtp" is the first draft step and the catching up with true states; "mtp_draft" reuses its block choices.
    """

    def __init__(self, config: ModelConfig, options: BuildOptions, name: str) -> None:
        super().__init__(config, options, name)
        form = "given" if name == "mtp_draft" else "select_return"
        self.mtp = MtpLayers(config, form, self.rope_scale, self.residual, self.cache_scales.get(MTP_LAYER))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        step, m, eps = self.step(inputs), self.mtp, self.config.rms_norm_eps
        embedding = m.fc_embedding(plain_rms_norm(self.embed(inputs), m.pre_fc_norm_embedding.weight, eps))
        hidden = self._hidden(inputs)
        normed = plain_rms_norm(hidden.flatten(-2), m.pre_fc_norm_hidden.weight, eps).unflatten(-1, hidden.shape[-2:])
        start = m.fc_hidden(normed.to(self.dtype)) + embedding[..., None, :]
        flow = m.layers[0](Flow(start=start) if self.residual.is_fp8 else Flow(r=start), step, MTP_LAYER)
        r, x = m.hyper_connection_mixer.finish(flow)
        values = {"logits": self.logits(x, inputs), **self.branches("hidden_out", r)}
        if step.blocks_out is not None:
            values["blocks"] = step.blocks_out
        return self.outputs(step, values)

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """The branches that it starts from. They come from the body or from a draft, so their scales come with them."""
        if not self.residual.is_fp8:
            return inputs["hidden"]
        return Codes(inputs["hidden"], inputs["hidden_token_scale"], self.dtype).values()


def build_graph(config: ModelConfig, options: BuildOptions, name: str) -> Graph:
    """The module of a graph, parameters uninitialised (build it under `torch.device("meta")`, then load)."""
    kinds: dict[str, type[Graph]] = {"head": Head, "body": Body, "mtp": Mtp, "mtp_draft": Mtp}
    return kinds[name](config, options, name)
