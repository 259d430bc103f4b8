"""Where a graph can be looked into: every op that touches the residual branches, in the model's order.

Between two Gated Residuals lies one block (token mixer, experts, n-gram injection). So what each of these ops takes and
gives says which block is wrong: its output `y` as it arrives, the branches `r` after it was written, and the next
block's input `x` with the write gates `s`. A watched graph has them as outputs, called `<site>.<port>`; sites carry the
names of the checkpoint's modules, such as `layers.3.mlp_hyper_connection`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashnext.export.config import SPARSE_ATTENTION, ModelConfig
from flashnext.export.graphs.io import MTP_LAYER, first_ngram_layer, layers_of
from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec
from flashnext.export.ops import schema
from flashnext.export.ops.ports import split_form

RESIDUAL, INJECTION = "GatedResidual", "NgramInjection"
WATCHED_OPS = (RESIDUAL, INJECTION)
ROLE = "site"

START = "start"
PORTS = {"embedding": START, "start": START, "y": "y", "r_out": "r", "x": "x", "s_out": "s"}
"""Ports that are watched, and the end of the output's name."""


@dataclass(frozen=True)
class Site:
    """One op on the branches: its module's name, the blocks whose output arrives there, and what is watched of it.

    `writers` made `y` (or `start`); `ports` maps the watched ports of the op to the outputs that show them.
    """

    name: str
    op: str
    form: str
    writers: tuple[str, ...]
    ports: Mapping[str, TensorSpec]

    def suspect(self, port: str) -> str:
        """The module to look at when this port is the first one that is wrong."""
        return " or ".join(self.writers) if port in ("y", START) and self.writers else self.name


def sites(manifest: Manifest, graph: str) -> list[Site]:
    """The sites of a graph, in the order in which its ops run."""
    found: list[Site] = []
    in_fp8 = manifest.residual_mode != "plain"
    for name, op, form, writers in _ops(manifest.config, graph, in_fp8):
        full = f"{form}_fp8_{manifest.residual_mode}" if in_fp8 else form
        found.append(Site(name, op, full, writers, _ports(manifest, name, op, full, first=not found)))
    return found


def watched_spec(manifest: Manifest, graph: str) -> GraphSpec:
    """Specification of a watched graph: its own outputs, then those of its sites."""
    spec = manifest.graphs[graph]
    found = [tensor for site in sites(manifest, graph) for tensor in site.ports.values()]
    return dataclasses.replace(spec, outputs=(*spec.outputs, *found))


def _ports(manifest: Manifest, site: str, op: str, form: str, first: bool) -> dict[str, TensorSpec]:
    table = schema.op(op).form(form)
    watched = {p: PORTS[p.name] for p in (*table.inputs, *table.outputs) if p.name in PORTS}
    if first and split_form(form)[0] == "settled":  # the draft layer's: nothing before it shows them
        watched = {p: START for p in table.inputs if p.name == "r"} | watched
    c = manifest.config
    sizes = {"n": c.hc_count, "H": c.hidden_size}
    return {
        port.name: TensorSpec(
            f"{site}.{name}",
            manifest.dtype if port.dtype == "T" else port.dtype,
            tuple(sizes.get(d, d) if isinstance(d, str) else d for d in port.shape),
            ROLE,
        )
        for port, name in watched.items()
    }


def _ops(config: ModelConfig, graph: str, in_fp8: bool) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Module, op, plain form, and who wrote what arrives there."""
    if graph.startswith("mtp"):
        start = ("mtp.fc_hidden", "mtp.fc_embedding", "the norms before them")
        attn, mlp = _pair(config, MTP_LAYER)
        yield f"{MTP_LAYER}.attn_hyper_connection", RESIDUAL, START if in_fp8 else "settled", start
        yield f"{MTP_LAYER}.mlp_hyper_connection", RESIDUAL, "pending", (attn,)
        yield "mtp.hyper_connection_mixer", RESIDUAL, "last", (mlp,)
        return
    handed_on = graph == "body" and first_ngram_layer(config) > 0
    form, writers = ("pending", ()) if handed_on else ("embed", ("embed_tokens",))
    for number in layers_of(config, graph):
        prefix = f"layers.{number}"
        if number in config.ngram_layers:
            yield f"{prefix}.ple", INJECTION, form, writers
            form, writers = "settled", ()
        attn, mlp = _pair(config, prefix)
        yield f"{prefix}.attn_hyper_connection", RESIDUAL, form, writers
        yield f"{prefix}.mlp_hyper_connection", RESIDUAL, "pending", (attn,)
        form, writers = "pending", (mlp,)
    if graph == "body":
        yield "hyper_connection_mixer", RESIDUAL, "last", writers


def _pair(config: ModelConfig, prefix: str) -> tuple[str, str]:
    """The two blocks of a layer."""
    sparse = prefix == MTP_LAYER or config.layer_types[int(prefix.split(".")[1])] == SPARSE_ATTENTION
    return f"{prefix}.{'self_attn' if sparse else 'linear_attn'}", f"{prefix}.mlp"
