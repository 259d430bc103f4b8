"""One step of the model: batches of tokens in, logits out. The only place of the runtime that calls an engine.

`ModelRunner.open` reads a bundle, finds its checkpoint, binds weights and states to the engines; `step` runs the head
graph while the n-gram rows are fetched, then the body. Who owns which slot, and what is kept of a step, is the
scheduler's business; rows of a batch only name their slot.

    runner = ModelRunner.open("bundle")
    out = runner.step(StepBatch(...))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.checkpoint.identity import identity
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import BundleError
from flashnext.export.files import plain
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.base import Array, Engine, numpy_dtype
from flashnext.runtime.engines.engine_set import EngineOptions, StepLimits, open_engines
from flashnext.runtime.hand_over import HandOver
from flashnext.runtime.logits import Floats, LogitRows
from flashnext.runtime.ngram import HostRows, RowsAhead, RowSource, Upcoming
from flashnext.runtime.ngram_memory import check_gather, check_room, table_bytes
from flashnext.runtime.row_metrics import RowCounts, RowMetrics

FED_ROLES = ("step", "rows", "edge")
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StepBatch:
    """S tokens for each of B sequences; rows shorter than S are padded with any valid id."""

    token_ids: Ints
    """[B, S]"""
    slots: Ints
    """[B], distinct; padding rows take slot `manifest.slots`"""
    past_len: Ints
    """[B] tokens committed before this step, kept ones included"""
    accepted: Ints
    """[B] how many of the slot's previous step's tokens were kept; 0 after a step with S > window"""
    new_len: Ints
    """[B] valid tokens of this step; 0: the row reads and writes nothing"""
    context: NDArray[np.int64]
    """[B, ngram_size - 1] the tokens just before `past_len`, eos on the left where there are none"""
    logit_rows: Ints
    """[N] which logits are wanted, as b * S + s"""


@dataclass(frozen=True)
class StepOutput:
    """What the body returns."""

    logits: Floats | LogitRows
    """[N, V]. An engine on a device may leave them there, too."""
    hidden: Array
    """[B, S, n, H] residual branches before the final Gated Residual: the draft layer's input (`hand_over` has more).
    An engine on a device may leave them there: then they can be cut and fed, until the next step."""


class ModelRunner:
    """Engines, weights, states and n-gram rows of one bundle."""

    def __init__(
        self,
        manifest: Manifest,
        engines: Mapping[str, Engine],
        states: Mapping[str, Array],
        row_sources: Mapping[str, RowSource],
        limits: StepLimits | None = None,
        close: Callable[[], None] = lambda: None,
        states_elsewhere: bool = False,
    ) -> None:
        """`close` is called when the runner is closed and lets go of what the engines share. `states_elsewhere`: see
        `EngineSet`."""
        self.manifest = manifest
        self.states = states
        self.limits = limits
        self.states_elsewhere = states_elsewhere
        self._engines = engines
        self._close = close
        self._row_sources = row_sources
        self._rows_on_device = any(source.on_device for source in row_sources.values())
        self._rows_ahead = RowsAhead(row_sources)
        self._hand_over = HandOver(manifest)
        self._metrics = RowMetrics()
        self._counted = RowCounts()

    @classmethod
    def open(
        cls,
        bundle: str | Path,
        engine: str = "onnxruntime",
        checkpoint: str | Path | None = None,
        threads: int | None = None,
        options: EngineOptions | None = None,
        ngram_table: str = "mapped",
        ngram_cache_bytes: int = 0,
    ) -> ModelRunner:
        """Open a bundle; `checkpoint` overrides where its weights are. `threads` is short for that option.

        `ngram_table` is how the n-gram tables are kept (`flashnext.runtime.ngram_memory`), `ngram_cache_bytes` memory
        for rows of a mapped one that were read before.

        Raises:
            BundleError: the bundle is damaged, or its checkpoint has moved or changed.
            EngineError: the engine is not installed or does not fit.
            RequestError: the tables do not fit into memory.
        """
        folder = Path(bundle)
        manifest = Manifest.read(folder)
        weights_from = open_checkpoint(manifest, checkpoint)
        _check_ngrams(manifest, weights_from, folder)
        options = options or EngineOptions(threads)
        options.check(engine)  # before tables are read
        check_gather(options.ngram_gather, ngram_table)
        check_room(ngram_table, table_bytes(manifest.ngrams, weights_from), ngram_cache_bytes)
        by_host = manifest.ngrams if options.ngram_gather == "host" else ()
        sources: dict[str, RowSource] = {}
        with ExitStack() as undo:
            for n in by_host:
                share = ngram_cache_bytes // len(by_host)
                sources[n.input] = HostRows.open(n, weights_from, manifest.dtype, ngram_table, share)
                undo.callback(sources[n.input].close)
            opened = open_engines(engine, folder, manifest, weights_from, options)
            undo.pop_all()
        sources |= opened.row_sources
        return cls(
            manifest, opened.engines, opened.states, sources, opened.limits, opened.close, opened.states_elsewhere
        )

    def step(self, batch: StepBatch, upcoming: Upcoming | None = None) -> StepOutput:
        """Run one step; states of the batch's slots change in place.

        The n-gram rows of `upcoming`, a step that is expected later, are fetched meanwhile.
        """
        values = _batch_values(batch)
        tickets, were_ahead = self._rows_ahead.take(Upcoming(batch.token_ids, batch.context, batch.new_len))
        if upcoming is not None:
            self._rows_ahead.fetch(upcoming)  # behind this step's own
        if "head" in self._engines:
            values.update(self._run("head", values))
        start = time.perf_counter()
        values.update({name: ticket.wait() for name, ticket in tickets.items()})
        waits = self._metrics.decode if batch.token_ids.shape[1] <= self.manifest.window else self._metrics.prefill
        waits.add(time.perf_counter() - start)
        self._metrics.fetched_ahead += were_ahead
        out = self._run("body", values)
        return StepOutput(out["logits"], self._hand_over.packed("hidden", out))

    def take_row_metrics(self) -> RowMetrics:
        """How steps since the last call waited for their n-gram rows, and what was gathered."""
        counts = sum((source.counts() for source in self._row_sources.values()), RowCounts())
        taken, self._metrics = self._metrics, RowMetrics()
        taken.counts, self._counted = counts - self._counted, counts
        taken.on_device = self._rows_on_device
        return taken

    @property
    def has_mtp(self) -> bool:
        """Whether the bundle holds the draft layer."""
        return "mtp" in self._engines

    def mtp_step(
        self, token_ids: Ints, hidden: Array, slots: Ints, past_len: Ints, new_len: Ints, logit_rows: Ints
    ) -> tuple[Floats | LogitRows, Array, Ints]:
        """Draft layer on pairs (hidden state after position t, token t + 1), run at position t.

        Returns logits [N, V] (position t predicts token t + 2), its own states (like `StepOutput.hidden`) and the
        blocks [B, K] that each row's last valid token chose. `past_len` counts the layer's own positions.
        """
        out = self._run(
            "mtp",
            {
                "token_ids": token_ids,
                **self._hand_over.fed(hidden),
                "slots": slots,
                "past_len": past_len,
                "new_len": new_len,
                "logit_rows": logit_rows,
            },
        )
        return out["logits"], self._hand_over.packed("hidden_out", out), out["blocks"]

    def mtp_draft(
        self,
        token_ids: Ints,
        hidden: Array,
        slots: Ints,
        past_len: Ints,
        new_len: Ints,
        blocks: Ints,
        blocks_len: Ints,
        logit_rows: Ints,
    ) -> tuple[Floats | LogitRows, Array]:
        """A later draft step: like `mtp_step`, with the blocks chosen when `blocks_len` tokens were seen."""
        out = self._run(
            "mtp_draft",
            {
                "token_ids": token_ids,
                **self._hand_over.fed(hidden),
                "slots": slots,
                "past_len": past_len,
                "new_len": new_len,
                "blocks": blocks,
                "blocks_len": blocks_len,
                "logit_rows": logit_rows,
            },
        )
        return out["logits"], self._hand_over.packed("hidden_out", out)

    def close(self) -> None:
        """Stop the row sources and let go of engines and states; the runner cannot be used afterwards."""
        for source in self._row_sources.values():
            source.close()
        self._engines, self._row_sources, self.states = {}, {}, {}
        self._rows_ahead = RowsAhead({})
        self._close()
        self._close = lambda: None

    def _run(self, graph: str, values: Mapping[str, Array]) -> dict[str, Array]:
        engine = self._engines[graph]
        return engine.run(_fed(engine, values))


def _batch_values(batch: StepBatch) -> dict[str, Array]:
    return {
        "token_ids": batch.token_ids,
        "slots": batch.slots,
        "past_len": batch.past_len,
        "accepted": batch.accepted,
        "new_len": batch.new_len,
        "logit_rows": batch.logit_rows,
    }


def _fed(engine: Engine, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph takes in a step, as contiguous arrays of its dtypes (a copy only if needed); what an engine left
    on its device goes there as it is."""
    return {
        spec.name: np.ascontiguousarray(values[spec.name], numpy_dtype(spec.dtype))
        if isinstance(values[spec.name], np.ndarray)
        else values[spec.name]
        for spec in engine.spec.inputs
        if spec.role in FED_ROLES
    }


def _check_ngrams(manifest: Manifest, checkpoint: Checkpoint, bundle: Path) -> None:
    """Other multipliers or sizes than the checkpoint's would find other rows, and nothing would fail."""
    for ngram in manifest.ngrams:
        if ngram != checkpoint.ngram_spec(ngram.layer):
            raise BundleError(
                f"The manifest of {bundle} does not describe the n-gram table of layer {ngram.layer} as its checkpoint "
                "does. Export the bundle again."
            )


def open_checkpoint(manifest: Manifest, override: str | Path | None = None) -> Checkpoint:
    """The checkpoint that the bundle was made from, where the manifest says or where the caller says.

    Raises:
        BundleError: it is not there, or it is another one than the bundle was made from.
    """
    folder = Path(manifest.checkpoint.path if override is None else override)
    if not folder.is_dir():
        raise BundleError(
            f"The bundle's checkpoint is not at {plain(str(folder))}. "
            "Say where it is with checkpoint=FOLDER (--checkpoint FOLDER)."
        )
    found = identity(folder)
    if found != manifest.checkpoint.identity:
        raise BundleError(
            f"The checkpoint at {folder} is not the one that the bundle was made from: its identity is {found:.12}…, "
            f"the bundle's {manifest.checkpoint.identity:.12}…. Give the right one with checkpoint=FOLDER "
            "(--checkpoint FOLDER), or export the bundle again."
        )
    return Checkpoint.open(folder)
