"""Drafts of the model's own draft layer (MTP).

The layer runs on pairs (true state after position t, token t + 1). After each step it first catches up on all kept
positions, which gives the first draft, then feeds on its own states for the others. What it remembers is addressed by
position, so positions that were drafted and rejected are overwritten the next time and never seen before.

The blocks that the layer's attention chose for the first draft serve the later ones too (design of the model); with
`reuse_blocks` off each draft chooses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.engines.base import Array
from flashnext.runtime.hand_over import join
from flashnext.runtime.logits import Floats, LogitRows
from flashnext.runtime.model_runner import Ints
from flashnext.runtime.speculation.draft import Progress

Logits = Floats | LogitRows


class DraftLayer(Protocol):
    """What is needed of a model runner."""

    def mtp_step(
        self, token_ids: Ints, hidden: Array, slots: Ints, past_len: Ints, new_len: Ints, logit_rows: Ints
    ) -> tuple[Logits, Array, Ints]: ...

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
    ) -> tuple[Logits, Array]: ...


class MtpDrafter:
    """Keeps the draft layer up with the text and drafts from it, for a batch of requests at a time."""

    def __init__(self, layer: DraftLayer, reuse_blocks: bool = True) -> None:
        self._layer = layer
        self._reuse_blocks = reuse_blocks

    def propose(self, rows: Sequence[Progress]) -> None:
        # A layer that has missed positions (drafting was off meanwhile) cannot catch up without their states.
        rows = [row for row in rows if row.request.sequence.fed == row.start]
        if not rows:
            return
        wanted = np.array([row.request.drafts_wanted() for row in rows])
        logits, states, blocks = self._catch_up(rows, wanted)
        seen = np.array([row.request.sequence.fed for row in rows], np.int32)
        drafting = np.flatnonzero(wanted)
        for depth in range(int(wanted.max())):
            if depth:
                drafting, last = _split(drafting, wanted > depth)
                logits, states = self._later(rows, drafting, [states[i] for i in last], seen, depth, blocks)
            for place, row in enumerate(drafting):
                rows[row].request.draft(logits[place])

    def _catch_up(self, rows: Sequence[Progress], wanted: NDArray[Any]) -> tuple[Logits, Sequence[Array], Ints]:
        """Feed all kept positions; logits [D, V] and states D x [1, n, H] of the rows that want drafts, all blocks."""
        width = max(row.kept for row in rows)
        token_ids = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            token_ids[i, : row.kept] = row.request.sequence.tokens[row.start + 1 : row.start + 1 + row.kept]
        kept = np.array([row.kept for row in rows], np.int32)
        drafting = np.flatnonzero(wanted)
        logit_rows = drafting * width + kept[drafting] - 1
        logits, states, blocks = self._layer.mtp_step(
            token_ids=token_ids,
            hidden=join([row.hidden for row in rows], width),
            slots=_slots(rows),
            past_len=np.array([row.start for row in rows], np.int32),
            new_len=kept,
            logit_rows=(logit_rows if len(drafting) else np.zeros(1)).astype(np.int32),
        )
        for row in rows:
            row.request.sequence.fed += row.kept
        return logits[: len(drafting)], [states[i, kept[i] - 1 : kept[i]] for i in drafting], blocks

    def _later(
        self,
        rows: Sequence[Progress],
        drafting: NDArray[Any],
        states: Sequence[Array],
        seen: Ints,
        depth: int,
        blocks: Ints,
    ) -> tuple[Logits, Sequence[Array]]:
        """Draft number `depth` (from 1) of the rows `drafting`, from the layer's own states, D of [1, n, H]."""
        chosen = [rows[i] for i in drafting]
        inputs: dict[str, Any] = {
            "token_ids": np.array([[row.request.sequence.drafts[-1].token] for row in chosen], np.int32),
            "hidden": join(states, 1),
            "slots": _slots(chosen),
            "past_len": seen[drafting] + np.int32(depth - 1),
            "new_len": np.ones(len(chosen), np.int32),
            "logit_rows": np.arange(len(chosen), dtype=np.int32),
        }
        if self._reuse_blocks:
            logits, after = self._layer.mtp_draft(**inputs, blocks=blocks[drafting], blocks_len=seen[drafting])
        else:
            logits, after, _ = self._layer.mtp_step(**inputs)
        return logits, [after[i] for i in range(len(chosen))]


def _slots(rows: Sequence[Progress]) -> Ints:
    return np.array([row.request.sequence.slot for row in rows], np.int32)


def _split(drafting: NDArray[Any], wants_more: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rows that want another draft, and where their states are among those of the last one."""
    places = np.flatnonzero(wants_more[drafting])
    return drafting[places], places
