"""Which earlier writes a block's input is made of: the exact decomposition of every read of the residual.

The branches are a sum of sources: the embedding, what each block wrote (s y), what each n-gram injection added. The
norm and the gate of a read only scale them, so the block's input is a sum over the sources too:

    x_v = sum over u of a(u -> v),    a(u -> v) = mean over branches of G_c * (1 + w_c) * s_c y_u / rms(R_c)

with the gates G and the norms of the whole R (Gated Residual as in docs/ops.md; (1 + w) is the zero-centred weight).
Nothing is approximated: computed in float64, from the float32 outputs and gates of the model, the contributions sum to
x up to the rounding of float64, and `Paths.sum_error` says by how much they do not. `Paths.model_error` compares the
same x with the one that the float32 model computed.

The share pi(u, v) is |a(u -> v)| over the sum of all |a(. -> v)|, per token, averaged over tokens. By branch the same
is said of the terms of the mean. The span of a path is the number of blocks from u to v: 1 for the block just before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashnext.calibration.residual.gates import normalised, read_gates
from flashnext.calibration.residual.stream import FINAL, Listener, Read, Store
from flashnext.export.config import ModelConfig

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """A writer or a reader: its name and its place, in blocks from the embedding (place 0)."""

    name: str
    place: int


def readers(config: ModelConfig) -> list[Block]:
    """Blocks that read, in order: each layer's mixer and experts, and the final read."""
    names = [f"layers.{i}.{kind}" for i in range(config.num_hidden_layers) for kind in ("mixer", "mlp")]
    return [Block(name, place) for place, name in enumerate([*names, FINAL], start=1)]


def sources(config: ModelConfig) -> list[Block]:
    """What is written, in order: the embedding, the injections just before their layer, each block."""
    out = [Block("embedding", 0)]
    for block in readers(config)[:-1]:
        layer, kind = block.name.split(".")[1:]
        if kind == "mixer" and int(layer) in config.ngram_layers:
            out.append(Block(f"layers.{layer}.ngram", block.place - 1))
        out.append(block)
    return out


@dataclass
class Paths:
    """Shares of every path, averaged over tokens; rows are readers, columns sources, in the order of the model.

    `shares` [V, U] sum to 1 in each row. `by_branch` [n, V, U]: all branches together sum to 1 in each row.
    """

    readers: list[Block]
    sources: list[Block]
    shares: Floats
    by_branch: Floats
    tokens: int = 0
    sum_error: float = 0.0
    """largest |sum of contributions - x| over the largest |x| of its token"""
    model_error: float = 0.0
    """the same against the float32 model's x"""

    def spans(self) -> Floats:
        """[V, U] blocks from source to reader."""
        places = np.array([b.place for b in self.readers])[:, None] - np.array([b.place for b in self.sources])
        spans: Floats = places.astype(np.float64)
        return spans

    def mean_spans(self) -> list[float]:
        """Mean span of what each branch carries, weighted by its shares."""
        spans = self.spans()
        return [float((part * spans).sum() / part.sum()) for part in self.by_branch]

    def branch_shares(self) -> list[float]:
        """How much of all inputs each branch carries."""
        return [float(part.sum() / self.by_branch.sum()) for part in self.by_branch]

    def longest(self, least_span: int = 12, most: int = 12) -> list[tuple[Block, Block, float]]:
        """The strongest paths of more than `least_span` blocks: source, reader, share."""
        long = np.where(self.spans() > least_span, self.shares, 0.0)
        order = np.argsort(-long, axis=None, kind="stable")[:most]
        found = [divmod(int(i), len(self.sources)) for i in order]
        return [(self.sources[u], self.readers[v], float(long[v, u])) for v, u in found if long[v, u] > 0]

    def by_span(self) -> dict[str, float]:
        """Mean share of the direct neighbours, of middle and of long spans."""
        spans = self.spans()
        groups = {"1": spans == 1, "2-12": (spans >= 2) & (spans <= 12), "over 12": spans > 12}
        return {name: float(self.shares[mask].sum() / len(self.readers)) for name, mask in groups.items()}


@dataclass(frozen=True)
class _Source:
    """What was added to the branches: gates [B, S, n, 1] times values [B, S, 1 or n, H], as the model made them."""

    gates: Tensor | None
    values: Tensor

    def wide(self) -> Tensor:
        """The same in float64, broadcast over the branches."""
        values = self.values.double()
        return values if self.gates is None else self.gates.double() * values


class PathListener(Listener):
    """Decomposes every read of the batches that it is shown; give it to `ResidualModel.run` (drafts off).

    Memory: outputs and gates of all blocks for one batch, and two arrays of its branches in float64.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._readers, self._sources = readers(config), sources(config)
        shape = (len(self._readers), len(self._sources))
        self._shares = torch.zeros(shape, dtype=torch.float64)
        self._by_branch = torch.zeros((config.hc_count, *shape), dtype=torch.float64)
        self._tokens, self._sum_error, self._model_error = 0, 0.0, 0.0
        self._written: list[_Source] = []
        self._row = 0
        self._waiting: Read | None = None
        self._settled = False

    def begin(self, tokens: NDArray[np.int32]) -> None:
        self._written, self._row, self._waiting, self._settled = [], 0, None, False
        self._tokens += tokens.size

    def read(self, event: Read) -> None:
        """A read comes before the store of what it reads, unless an injection has stored it already."""
        if self._settled:
            self._decompose(event)
        else:
            self._waiting = event
        self._settled = False

    def store(self, event: Store) -> None:
        if event.y is not None and event.s is not None:
            self._written.append(_Source(event.s[..., None], event.y[..., None, :]))
        elif event.before is None:
            start = event.after if event.injection is None else event.after - event.injection
            self._written.append(_Source(None, start))
        if event.injection is not None:
            self._written.append(_Source(None, event.injection))
            self._settled = True
        elif self._waiting is not None:
            self._decompose(self._waiting)

    def _decompose(self, event: Read) -> None:
        module = event.module
        assert module is not None
        r = sum((source.wide() for source in self._written), torch.zeros_like(event.r, dtype=torch.float64))
        normed, factor = normalised(r, module)
        gates = read_gates(normed, module)
        coefficient = gates * factor / r.shape[-2]
        x, total = (gates * normed).mean(-2), torch.zeros_like(r[..., 0, :])
        norms, by_branch = [], []
        for source in self._written:
            terms = coefficient * source.wide()
            contribution = terms.sum(-2)
            total += contribution
            norms.append(contribution.norm(dim=-1))
            by_branch.append(terms.norm(dim=-1))
        self._shares[self._row, : len(norms)] += _token_shares(torch.stack(norms, -1), (-1,)).flatten(0, -2).sum(0)
        branches = _token_shares(torch.stack(by_branch, -1), (-2, -1)).flatten(0, -3).sum(0)
        self._by_branch[:, self._row, : len(norms)] += branches
        self._sum_error = max(self._sum_error, _relative(total, x))
        self._model_error = max(self._model_error, _relative(event.x.double(), x))
        self._row += 1

    def result(self) -> Paths:
        """What was found so far."""
        count = max(self._tokens, 1)
        shares, by_branch = (self._shares / count).numpy(), (self._by_branch / count).numpy()
        return Paths(self._readers, self._sources, shares, by_branch, self._tokens, self._sum_error, self._model_error)


def _token_shares(norms: Tensor, over: tuple[int, ...]) -> Tensor:
    """Each token's norms as shares of their sum; a token without any input shares nothing."""
    total = norms.sum(over, keepdim=True)
    return torch.where(total > 0, norms / total, 0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the token's largest expected value."""
    largest = expected.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float(((found - expected).abs() / largest).max())
