"""The PyTorch model over batches of tokens, with every read and store of its residual branches in the open.

    model = ResidualModel.open(checkpoint, batch=4, length=512)
    logits = model.run(tokens, listener)                    # tokens [B, S + 1] int, the last column is only drafted on
    logits = model.run(tokens, storage=fp8)                 # the same model, its branches rounded where they are stored

The modules that are run are those of `flashnext.export.model`, with the checkpoint's weights in whatever form the
export takes them. Only the modules that touch the branches are wrapped: they compute with the reference's own
functions and show the float32 branches to a `Listener`. A `Storage` stands for the memory between two blocks: it gets
the float32 branches and returns what comes back from it. As in the graphs, a read that writes first uses the value
before the rounding; a read with nothing to write (after an n-gram injection) gets the rounded one.

Names are those of `flashnext.export.residual_scales.store_names`. A read is named like the store of the block that it
feeds: `layers.3.mixer` reads the input of layer 3's mixer; the last one is `final`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.bundle import describe
from flashnext.export.graphs.io import MTP_LAYER, BuildOptions
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.model.graphs import Backbone, Body, Mtp
from flashnext.export.model.layers import DecoderLayer, Flow, GatedResidual, NgramInjection, Step, plain_rms_norm
from flashnext.export.ops.reference.gated_residual import read, write, write_gates
from flashnext.export.residual_scales import last_store
from flashnext.runtime.engines.base import Engine
from flashnext.runtime.engines.torch_engine import TorchEngine
from flashnext.runtime.model_runner import ModelRunner, StepBatch
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights

FINAL = "final"
DRAFT_INPUT = f"{MTP_LAYER}.input"
WINDOW = 1
"""Tokens that wait for their acceptance: a step of one token, when greedy text is written."""

Storage = Callable[[str, Tensor, Tensor], Tensor]
"""(store, float32 branches [B, S, n, H], positions [B, S]) -> the float32 branches that are read back."""
Reader = Callable[[Tensor], Tensor]
"""Branches [..., n, H] -> what the next block sees of them [..., H]."""


@dataclass(frozen=True)
class Read:
    """A block's input is made. `reader(r)` is `x`, so that a changed r can be read again."""

    site: str
    r: Tensor
    """[B, S, n, H] float32, with the pending write"""
    x: Tensor
    """[B, S, H]; at the draft layer's start the normalised branches, [B, S, n*H]"""
    s: Tensor | None
    """[B, S, n] write gates of the block that x feeds, in (0, 2); none at the end"""
    reader: Reader
    module: GatedResidual | None
    """whose weights read; None at the draft layer's start"""


@dataclass(frozen=True)
class Store:
    """The branches are stored."""

    name: str
    before: Tensor | None
    """[B, S, n, H] as they were read back from the store before; None where the branches start"""
    after: Tensor
    """[B, S, n, H] float32, before they are rounded: before + s y + injection"""
    y: Tensor | None
    """[B, S, H] output of the block that is written"""
    s: Tensor | None
    """[B, S, n] its write gates"""
    injection: Tensor | None = None
    """[B, S, n, H] what an n-gram injection adds"""


class Listener:
    """Looks at every read and store, in order; a read comes before the store of the same branches."""

    def begin(self, tokens: NDArray[np.int32]) -> None:
        """A new batch [B, S] starts, at position 0."""

    def read(self, event: Read) -> None:
        """A block's input has been made."""

    def store(self, event: Store) -> None:
        """The branches are about to be rounded."""


@dataclass
class _Tap:
    """What the wrapped modules report to and store in; set anew for each batch."""

    listener: Listener
    storage: Storage | None
    positions: Tensor

    def store(self, event: Store) -> Tensor:
        self.listener.store(event)
        return event.after if self.storage is None else self.storage(event.name, event.after, self.positions)


class _ObservedRead(nn.Module):
    """A Gated Residual that shows what it reads and stores."""

    def __init__(self, inner: GatedResidual, site: str, store: str, tap: _Tap) -> None:
        super().__init__()
        self.inner, self.site, self.store, self.tap = inner, site, store, tap
        self.branches, self.eps = int(inner.attributes["branches"]), float(inner.attributes["eps"])

    def reader(self, r: Tensor) -> Tensor:
        """x [..., H] of branches [..., n, H]."""
        return self._read(r)[0]

    def forward(self, flow: Flow) -> tuple[Tensor, Tensor, Tensor | None]:
        form, inputs = _plain(flow)
        if form == "embed":
            r = inputs[0].float()[..., None, :].repeat(1, 1, self.branches, 1)
        else:
            r = write(*inputs) if form == "pending" else inputs[0]
        x, flat = self._read(r)
        inject = self.inner.block_inject_weight
        s = None if inject is None else write_gates(flat, inject.weight, self.branches)
        self.tap.listener.read(Read(self.site, r, x, s, self.reader, self.inner))
        if form == "settled" and self.store != DRAFT_INPUT:
            return r, x, s
        before, y, gates = inputs if form == "pending" else (None, None, None)
        return self.tap.store(Store(self.store, before, r, y, gates)), x, s

    def finish(self, flow: Flow) -> tuple[Tensor, Tensor]:
        """The final read of a graph, which feeds no block."""
        r, x, _ = self.forward(flow)
        return r, x

    def _read(self, r: Tensor) -> tuple[Tensor, Tensor]:
        i = self.inner
        weights = i.hc_norm.weight, i.input_mix_weight_down.weight, i.input_mix_weight_up.weight
        return read(r, *weights, self.branches, self.eps)


class _ObservedInjection(nn.Module):
    """An n-gram injection that shows what it stores."""

    def __init__(self, inner: NgramInjection, store: str, tap: _Tap) -> None:
        super().__init__()
        self.inner, self.store, self.tap = inner, store, tap

    def forward(self, flow: Flow, rows: Tensor, step: Step, prefix: str) -> Flow:
        after = self.inner(flow, rows, step, prefix).r
        form, inputs = _plain(flow)
        written = write(*inputs) if form == "pending" else inputs[0][..., None, :]
        before = inputs[0] if form == "pending" else None
        event = Store(self.store, before, after, flow.y, flow.s, after - written)
        return Flow(r=self.tap.store(event))


def _plain(flow: Flow) -> tuple[str, list[Tensor]]:
    """The op's form and first inputs. Here the modules' branches are tensors: eight bits are the storage's business."""
    form, inputs = flow.form()
    return form, cast("list[Tensor]", inputs)


def _observe(module: Backbone | Mtp, config: ModelConfig, tap: _Tap) -> None:
    """Wrap a graph's modules that touch the branches."""
    for prefix, layer, start in _layers(module):
        if layer.ple is not None:
            layer.ple = _ObservedInjection(layer.ple, f"{prefix}.ngram", tap)  # type: ignore[assignment]
        first, second = layer.attn_hyper_connection, layer.mlp_hyper_connection
        layer.attn_hyper_connection = _ObservedRead(first, f"{prefix}.mixer", start, tap)  # type: ignore[assignment]
        layer.mlp_hyper_connection = _ObservedRead(  # type: ignore[assignment]
            second, f"{prefix}.mlp", f"{prefix}.mixer", tap
        )
    if isinstance(module, Body):
        final = module.hyper_connection_mixer
        module.hyper_connection_mixer = _ObservedRead(final, FINAL, last_store(config), tap)  # type: ignore[assignment]
    elif isinstance(module, Mtp):
        final = module.mtp.hyper_connection_mixer
        names = f"{MTP_LAYER}.{FINAL}", f"{MTP_LAYER}.mlp"
        module.mtp.hyper_connection_mixer = _ObservedRead(final, *names, tap)  # type: ignore[assignment]


def _layers(module: Backbone | Mtp) -> Iterator[tuple[str, DecoderLayer, str]]:
    """Prefix of each decoder layer, the layer, and the store at its start (unused after an injection)."""
    if isinstance(module, Mtp):
        yield MTP_LAYER, module.mtp.layers[0], DRAFT_INPUT  # type: ignore[misc]
        return
    for number, layer in module.layers.items():
        start = f"layers.{int(number) - 1}.mlp" if int(number) else "embedding"
        yield f"layers.{number}", layer, start  # type: ignore[misc]


class ResidualModel:
    """A checkpoint's model for batches of up to `batch` windows of `length` tokens, in float32."""

    def __init__(self, manifest: Manifest, checkpoint: Checkpoint) -> None:
        self.manifest, self.config = manifest, checkpoint.config
        states = allocate_states(manifest)
        bound = {**load_weights(manifest, checkpoint), **states}
        self._tap = _Tap(Listener(), None, torch.zeros(1, 1))
        engines: dict[str, Engine] = {}
        for name in (n for n in manifest.graphs if n != "mtp_draft"):
            engine = TorchEngine(name, manifest, checkpoint, threads=None)
            engine.bind(bound)
            engines[name] = engine
            _observe(engine.module, self.config, self._tap)  # type: ignore[arg-type]
            if isinstance(engine.module, Mtp):
                weight, eps = engine.module.mtp.pre_fc_norm_hidden.weight, self.config.rms_norm_eps
                self._draft_reader = partial(_normalised, weight=weight, eps=eps)
        rows = {n.input: HostRows.open(n, checkpoint, manifest.dtype) for n in manifest.ngrams}
        self._runner = ModelRunner(manifest, engines, states, rows)

    @classmethod
    def open(cls, checkpoint: Checkpoint, batch: int, length: int) -> ResidualModel:
        """Load the model; memory for its weights is taken once.

        Raises:
            ConfigError: more tokens in a window than the model's context.
            CheckpointError: weights that cannot be read.
        """
        options = BuildOptions(window=WINDOW, capacity=length, slots=batch)
        options.check(checkpoint.config)
        return cls(describe(checkpoint, checkpoint.config, options), checkpoint)

    @property
    def identity(self) -> str:
        """The checkpoint's identity (`flashnext.export.checkpoint.identity`)."""
        return self.manifest.checkpoint.identity

    def run(
        self,
        tokens: NDArray[np.int32],
        listener: Listener | None = None,
        storage: Storage | None = None,
        *,
        logits: bool = True,
        drafts: bool = False,
    ) -> NDArray[np.float32]:
        """Logits [B, S, V] of windows tokens [B, S + 1] (the last token is the target of the last prediction).

        Args:
            logits: whether they are wanted; without them the result is [B, 0, V].
            drafts: run the draft layer too (a model without one has nothing to run).
        """
        fed, (rows, length) = tokens[:, :-1], (len(tokens), tokens.shape[1] - 1)
        self._set(listener, storage, np.zeros(rows, np.int32), length)
        self._tap.listener.begin(fed)
        wanted = np.arange(rows * length if logits else 0, dtype=np.int32)
        out = self._runner.step(self._batch(fed, np.zeros(rows), np.zeros(rows), wanted, self._no_context(rows)))
        if drafts and self.config.has_mtp:
            self._run_drafts(np.ascontiguousarray(tokens[:, 1:]), out.hidden)
        return np.asarray(out.logits).reshape(rows, length if logits else 0, self.config.vocab_size)

    def greedy(self, prompts: NDArray[np.int32], count: int, storage: Storage | None = None) -> NDArray[np.int32]:
        """The `count` tokens [B, count] that greedy decoding writes after prompts [B, S], S above 1."""
        text, kept = prompts, 0
        while True:
            fed = text[:, kept:]
            rows, length = fed.shape
            past, accepted = np.full(rows, kept, np.int32), np.full(rows, int(kept > prompts.shape[1]))
            self._set(None, storage, past, length)
            last = np.arange(1, rows + 1, dtype=np.int32) * length - 1
            context = text[:, :kept][:, -(self.config.ngram_size - 1) :] if kept else self._no_context(rows)
            out = self._runner.step(self._batch(fed, past, accepted, last, context))
            kept = text.shape[1]
            text = np.concatenate([text, np.asarray(out.logits).argmax(-1).astype(np.int32)[:, None]], axis=1)
            if text.shape[1] == prompts.shape[1] + count:
                return text[:, prompts.shape[1] :]

    def close(self) -> None:
        """Let go of weights, states and threads."""
        self._runner.close()

    def _set(self, listener: Listener | None, storage: Storage | None, past: NDArray[Any], length: int) -> None:
        self._tap.listener, self._tap.storage = listener or Listener(), storage
        self._tap.positions = torch.from_numpy(past.astype(np.int64)[:, None] + np.arange(length))

    def _no_context(self, rows: int) -> NDArray[np.int64]:
        eos = self.config.ngram_eos if self.config.ngram_layers else 0
        return np.full((rows, self.config.ngram_size - 1), eos, np.int64)

    def _batch(
        self,
        tokens: NDArray[np.int32],
        past: NDArray[Any],
        accepted: NDArray[Any],
        logit_rows: NDArray[np.int32],
        context: NDArray[Any],
    ) -> StepBatch:
        rows, length = tokens.shape
        return StepBatch(
            token_ids=np.ascontiguousarray(tokens, np.int32),
            slots=np.arange(rows, dtype=np.int32),
            past_len=past.astype(np.int32),
            accepted=accepted.astype(np.int32),
            new_len=np.full(rows, length, np.int32),
            context=context.astype(np.int64),
            logit_rows=logit_rows,
        )

    def _run_drafts(self, following: NDArray[np.int32], hidden: NDArray[Any]) -> None:
        """The draft layer on pairs (branches after position t, token t + 1)."""
        rows, length = following.shape
        self._show_hidden(hidden)
        zeros = np.zeros(rows, np.int32)
        _, own, _ = self._runner.mtp_step(
            token_ids=following,
            hidden=hidden,
            slots=np.arange(rows, dtype=np.int32),
            past_len=zeros,
            new_len=np.full(rows, length, np.int32),
            logit_rows=zeros[:0],
        )
        self._show_hidden(own)  # further drafts start from the layer's own branches

    def _show_hidden(self, hidden: NDArray[Any]) -> None:
        r = torch.from_numpy(np.asarray(hidden, np.float32))
        self._tap.listener.read(Read(DRAFT_INPUT, r, self._draft_reader(r), None, self._draft_reader, None))


def _normalised(r: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What the draft layer sees of the branches: [..., n, H] -> [..., n*H]."""
    return plain_rms_norm(r.flatten(-2), weight, eps)
