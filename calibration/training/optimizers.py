"""Which optimizer trains what: Muon for matrices, AdamW for everything else; every parameter in exactly one place.

Muon orthogonalizes updates, which means something for one linear map at a time. Fused projections are therefore cut
into their logical matrices first: q, k and v of a delta net, queries and gates of attention, index queries and key,
gate and up of each expert, the branches of the n-gram keys. A piece that is a plain run of rows shares the
parameter's memory; the others are copied before and after the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from flashnext.calibration.training.muon import BatchedMuon
from flashnext.export.config import ModelConfig

Cut = Callable[[Tensor], list[Tensor]]
"""From a parameter (or its gradient) to its logical matrices."""


class ConfiguredCut(Protocol):
    """A cut that depends on the model's sizes."""

    def __call__(self, w: Tensor, c: ModelConfig) -> list[Tensor]: ...


def _delta_net(w: Tensor, c: ModelConfig) -> list[Tensor]:
    return list(w.split([c.linear_key_dim, c.linear_key_dim, c.linear_value_dim]))


def _query_and_gate(w: Tensor, c: ModelConfig) -> list[Tensor]:
    return list(w.unflatten(0, (c.num_attention_heads, 2, c.head_dim)).unbind(1))


def _index(w: Tensor, c: ModelConfig) -> list[Tensor]:
    return list(w.split([c.indexer_n_heads * c.indexer_head_dim, c.indexer_head_dim]))


def _gate_up(w: Tensor, c: ModelConfig) -> list[Tensor]:
    return [half for expert in w for half in expert.split(c.moe_intermediate_size)]


def _branches(w: Tensor, c: ModelConfig) -> list[Tensor]:
    return list(w.split(c.hidden_size))


MUON: tuple[tuple[str, ConfiguredCut], ...] = (
    (r"linear_attn\.in_proj_qkv\.weight", _delta_net),
    (r"linear_attn\.(in_proj_z|out_proj)\.weight", lambda w, c: [w]),
    (r"self_attn\.q_proj\.weight", _query_and_gate),
    (r"self_attn\.[kvo]_proj\.weight", lambda w, c: [w]),
    (r"indexer\.index_qk_proj\.weight", _index),
    (r"experts\.gate_up_proj", _gate_up),
    (r"experts\.down_proj", lambda w, c: list(w)),
    (r"shared_expert\.(gate|up|down)_proj\.weight", lambda w, c: [w]),
    (r"ple\.key_proj\.weight", _branches),
    (r"ple\.value_proj\.weight", lambda w, c: [w]),
    (r"mtp\.fc_(embedding|hidden)\.weight", lambda w, c: [w]),
)
"""Parameters by the end of their names, and how each is cut. The rest (embeddings, LM head, n-gram table, vectors,
convolutions, router, and the gates of the residual, of experts and of the delta rule) is AdamW's."""

TABLE = "ngram_embedding.weight"
UNDECAYED = ("embed_tokens.weight", TABLE)
"""Looked up, not multiplied: decay would pull rare rows to zero between their uses."""


class Pieces:
    """A parameter as its logical matrices: `matrices` are what Muon steps."""

    def __init__(self, parameter: nn.Parameter, cut: Cut) -> None:
        self.parameter, self.cut = parameter, cut
        views = cut(parameter.data)
        self.matrices = [nn.Parameter(v if v.dim() == 2 else v.flatten(0, 1).clone()) for v in views]
        self.copied = [(m, v) for m, v in zip(self.matrices, views, strict=True) if v.dim() > 2]
        """Matrices that do not share the parameter's memory, and their places in it."""

    def take_gradient(self) -> None:
        """Hand the parameter's gradient to the matrices."""
        grad = self.parameter.grad
        parts = [None] * len(self.matrices) if grad is None else self.cut(grad)
        for matrix, part in zip(self.matrices, parts, strict=True):
            matrix.grad = None if part is None else part.reshape(matrix.shape)

    def put_back(self) -> None:
        """Carry stepped copies into the parameter."""
        for matrix, view in self.copied:
            view.copy_(matrix.data.view(view.shape))

    def refresh(self) -> None:
        """Carry a parameter that was loaded into the copies."""
        for matrix, view in self.copied:
            matrix.data.copy_(view.reshape(matrix.shape))


@dataclass(frozen=True)
class Rates:
    """Peak learning rates. Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982, section 2.2)."""

    muon: float = 1e-2
    adamw: float = 4e-3
    table: float = 1e-2


class Optimizers:
    """Muon and AdamW as one."""

    def __init__(self, named: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut], rates: Rates) -> None:
        """`cuts`: how each of Muon's parameters falls into its logical matrices; the rest is AdamW's."""
        groups = split(named, cuts)
        self.pieces = [Pieces(named[name], cuts[name]) for name in groups["muon"]]
        self.muon = BatchedMuon(
            [m for p in self.pieces for m in p.matrices],
            lr=rates.muon,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": [named[n] for n in groups["decayed"]], "weight_decay": 0.1, "lr": rates.adamw},
                {"params": [named[n] for n in groups["plain"]], "weight_decay": 0.0, "lr": rates.adamw},
                {"params": [named[n] for n in groups["table"]], "weight_decay": 0.0, "lr": rates.table},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.peaks = [[g["lr"] for g in o.param_groups] for o in (self.muon, self.adamw)]

    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rates; parameters without a gradient stay as they are."""
        for optimizer, peaks in zip((self.muon, self.adamw), self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
        for piece in self.pieces:
            piece.take_gradient()
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for piece in self.pieces:
                piece.put_back()

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: Mapping[str, dict[str, object]]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        for piece in self.pieces:
            piece.refresh()


def split(named: Mapping[str, nn.Parameter], cuts: Collection[str]) -> dict[str, list[str]]:
    """Names of the parameters in each group: "muon", and AdamW's "decayed", "plain" and "table"."""
    groups: dict[str, list[str]] = {"muon": [], "decayed": [], "plain": [], "table": []}
    for name, parameter in named.items():
        if name in cuts:
            groups["muon"].append(name)
        elif name.endswith(TABLE):
            groups["table"].append(name)
        else:
            matrix = parameter.dim() == 2 and not name.endswith(UNDECAYED)
            groups["decayed" if matrix else "plain"].append(name)
    return groups


def cuts_of(names: Iterable[str], config: ModelConfig) -> dict[str, Cut]:
    """Muon's parameters among the names, each with its cut for a configuration."""
    found = {n: next((cut for pattern, cut in MUON if re.search(pattern + "$", n)), None) for n in names}
    return {name: partial(cut, c=config) for name, cut in found.items() if cut is not None}
