"""What a way of storing the residual costs: the model under each of them, on the same held-out text.

The first of the ways is the yardstick. For the others:

    loss          nats per token, and the difference from the yardstick with its standard error over windows
    KL            mean over tokens of KL(yardstick || this), nats
    agreement     share of tokens where the most likely next token is the yardstick's
    greedy        how many tokens of the yardstick's greedy text this one writes too, before the first other one
    input error   relative error of every block's input, by depth: all roundings up to there have added up
    lost, clipped share of updates below half a step, and of values cut to the largest code, for each store and branch

Greedy text needs no decoding of its own for each way: up to the first other token both have the same prefix, so one
pass over the yardstick's text shows where the most likely token first differs.

Batches go through all ways one after the other, so nothing is kept but sums: memory does not grow with the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashnext.calibration.residual.lost_updates import LostUpdates, half_step
from flashnext.calibration.residual.observers import Several
from flashnext.calibration.residual.storage import Fp8Storage
from flashnext.calibration.residual.stream import Listener, Read, ResidualModel, Storage, Store
from flashnext.calibration.residual.text import Windows

PROMPT_TOKENS, WRITTEN_TOKENS = 32, 64
PROMPTS = 16
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Way:
    """A way of storing the residual; without `storage` it stays float32."""

    name: str
    storage: Storage | None = None


@dataclass
class Quality:
    """Figures of one way; see the module's docstring."""

    name: str
    tokens: int = 0
    loss: float = 0.0
    loss_difference: float = 0.0
    standard_error: float = 0.0
    divergence: float = 0.0
    agreement: float = 0.0
    greedy: list[int] = field(default_factory=list)
    """for each prompt how many of its greedy tokens are the yardstick's"""
    input_errors: dict[str, float] = field(default_factory=dict)
    lost: dict[str, list[float]] = field(default_factory=dict)
    lost_energy: dict[str, list[float]] = field(default_factory=dict)
    clipped: dict[str, list[float]] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def greedy_mean(self) -> float:
        """Mean of `greedy`."""
        return float(np.mean(self.greedy)) if self.greedy else 0.0


class InputErrors(Listener):
    """Compares every block's input with that of the yardstick's pass over the same batch."""

    def __init__(self) -> None:
        self._squares: dict[str, list[float]] = {}
        self._expected: dict[str, Tensor] = {}

    def expect(self, inputs: dict[str, Tensor]) -> None:
        """The yardstick's inputs by site."""
        self._expected = inputs

    def read(self, event: Read) -> None:
        x = self._expected[event.site]
        sums = self._squares.setdefault(event.site, [0.0, 0.0])
        sums[0] += float((event.x - x).double().square().sum())
        sums[1] += float(x.double().square().sum())

    def figures(self) -> dict[str, float]:
        return {site: math.sqrt(e / v) if v > 0 else 0.0 for site, (e, v) in self._squares.items()}


class Inputs(Listener):
    """Keeps every block's input of one batch."""

    def __init__(self) -> None:
        self.by_site: dict[str, Tensor] = {}

    def begin(self, tokens: NDArray[np.int32]) -> None:
        self.by_site = {}

    def read(self, event: Read) -> None:
        self.by_site[event.site] = event.x


class StoreLosses(Listener):
    """Lost updates and clipped values of FP8 stores, with the very branches that came back from the store before."""

    def __init__(self, storage: Fp8Storage) -> None:
        self._storage = storage
        self.lost: dict[str, LostUpdates] = {}
        self._clipped: dict[str, Tensor] = {}
        self._values: dict[str, int] = {}

    def store(self, event: Store) -> None:
        form, branches = self._storage.form, event.after.shape[-2]
        scale = self._storage.scale(event.name, event.after)
        if event.before is not None:
            self.lost.setdefault(event.name, LostUpdates(branches)).add(event.before, event.after, scale, form)
        largest = form.largest * scale[..., None].expand(*event.after.shape[:-1], 1)
        edge = largest + half_step(largest, scale, form)  # what rounding alone would bring back to the largest code
        beyond = (event.after.abs() > edge).double().sum((0, 1, 3))
        self._clipped[event.name] = self._clipped.get(event.name, 0) + beyond
        self._values[event.name] = self._values.get(event.name, 0) + event.after.numel() // branches

    def clipped(self) -> dict[str, list[float]]:
        return {name: (count / self._values[name]).tolist() for name, count in self._clipped.items()}


class _Meter:
    """Sums of one way over all batches."""

    def __init__(self, way: Way) -> None:
        self.way, self.inputs = way, InputErrors()
        self.stores = StoreLosses(way.storage) if isinstance(way.storage, Fp8Storage) else None
        self.listener = Several([self.inputs, *([self.stores] if self.stores else [])])
        self._nats: list[NDArray[np.float64]] = []
        self._differences: list[NDArray[np.float64]] = []
        self._divergence = self._agreed = 0.0

    def add(self, own: Tensor, expected: Tensor, targets: Tensor) -> None:
        """Log probabilities [B, S, V] of this way and of the yardstick; the tokens that came, [B, S]."""
        nats = -own.gather(-1, targets[..., None])[..., 0].double()
        yardstick = -expected.gather(-1, targets[..., None])[..., 0].double()
        self._nats.append(nats.mean(-1).numpy())
        self._differences.append((nats - yardstick).mean(-1).numpy())
        self._divergence += float((expected.exp() * (expected - own)).sum(-1, dtype=torch.float64).sum())
        self._agreed += float((own.argmax(-1) == expected.argmax(-1)).sum())

    def quality(self, tokens: int, greedy: list[int]) -> Quality:
        nats, differences = (np.concatenate(parts) for parts in (self._nats, self._differences))
        out = Quality(self.way.name, tokens, float(nats.mean()), float(differences.mean()), greedy=greedy)
        if len(differences) > 1:
            out.standard_error = float(differences.std(ddof=1) / math.sqrt(len(differences)))
        out.divergence, out.agreement = self._divergence / tokens, self._agreed / tokens
        out.input_errors = self.inputs.figures()
        if self.stores is not None:
            shares = {name: lost.shares() for name, lost in self.stores.lost.items()}
            out.lost = {name: number for name, (number, _) in shares.items()}
            out.lost_energy = {name: energy for name, (_, energy) in shares.items()}
            out.clipped = self.stores.clipped()
        return out


def measure(
    model: ResidualModel,
    held_out: Windows,
    ways: Sequence[Way],
    batch: int,
    done: Callable[[], object] = lambda: None,
) -> list[Quality]:
    """Figures of every way, in order; the first is the yardstick. `done` is called `measure_steps` times."""
    meters = [_Meter(way) for way in ways]
    with torch.inference_mode():
        for tokens in held_out.batches(batch):
            _measure_batch(model, tokens, meters, done)
        greedy = _greedy(model, held_out, ways, batch, done)
    return [meter.quality(held_out.count, equal) for meter, equal in zip(meters, greedy, strict=True)]


def measure_steps(held_out: Windows, ways: int, batch: int) -> int:
    """How often `measure` reports progress."""
    return -(-len(held_out.tokens) // batch) * ways + -(-len(_prompts(held_out)) // batch) * (ways + 1)


def _measure_batch(
    model: ResidualModel, tokens: NDArray[np.int32], meters: list[_Meter], done: Callable[[], object]
) -> None:
    targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))
    inputs, expected = Inputs(), None
    for meter in meters:
        if expected is not None:
            meter.inputs.expect(inputs.by_site)
        logits = model.run(tokens, inputs if expected is None else meter.listener, meter.way.storage)
        own = torch.from_numpy(logits).log_softmax(-1)
        expected = own if expected is None else expected
        meter.add(own, expected, targets)
        done()


def _prompts(held_out: Windows) -> NDArray[np.int32]:
    """Beginnings of the first windows; a short window gives a short prompt, of two tokens at least."""
    return held_out.tokens[:PROMPTS, : min(PROMPT_TOKENS, max(held_out.length // 2, 2))]


def _greedy(
    model: ResidualModel, held_out: Windows, ways: Sequence[Way], batch: int, done: Callable[[], object]
) -> list[list[int]]:
    """For every way and prompt the number of equal tokens."""
    prompts, out = _prompts(held_out), [[] for _ in ways]  # type: ignore[var-annotated]
    count = min(WRITTEN_TOKENS, held_out.length - prompts.shape[1])
    if count < 1:
        return out
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        written = model.greedy(part, count, ways[0].storage)
        done()
        whole = np.concatenate([part, written], axis=1)
        for way, equal in zip(ways, out, strict=True):
            predicted = model.run(whole, storage=way.storage)[:, part.shape[1] - 1 :].argmax(-1)
            equal += [int((row != other).argmax()) if (row != other).any() else count
                      for row, other in zip(predicted, written, strict=True)]  # fmt: skip
            done()
    return out
