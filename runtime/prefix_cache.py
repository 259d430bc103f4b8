"""States of prompts that were run before, so that a prompt that starts the same need not run its start again.

    cache = PrefixCache(states, limit_bytes=1 << 30)
    cache.save(sequence)        # what its slot holds now, if that is worth keeping
    cache.restore(sequence)     # on admission: the longest saved start of its tokens, copied into its slot

The recurrent state of a Gated DeltaNet exists only where it was saved: it cannot be cut back to an earlier token, as
keys and values could. So whole slots are saved, with the count of tokens that are still pending in them. Saved are the
prompt's end, the end of the generation (the next turn of a chat starts with it), and ends of chunks that a second
prompt has reached as well. Of what is addressed by position only the used part is copied. The least recently used go
first.

A request that drafts takes only what the draft layer had seen to the end; so the layer is brought up to the end of a
generation before that is saved. The layer's last place has met the token that came next when it was saved; where
another one follows now, drafts may differ; only texts with drawn ones show it.

A restored start gives the states bit by bit; the rest of the prompt is cut into chunks from there on, so sums may round
otherwise than in a run from the start.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flashnext.runtime.engines.base import Array
from flashnext.runtime.sequence import Sequence

BY_POSITION = ("key_state", "value_state")
BY_BLOCK = ("index_key_state",)
MAX_SEEN = 4096
"""Ends of chunks that are remembered (by hash) to notice a second prompt that reaches them."""


@dataclass(frozen=True)
class Snapshot:
    """What a slot held after `past` tokens, the last `pending` of them uncommitted; `fed`: seen by the draft layer."""

    past: int
    pending: int
    fed: int
    states: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.states.values())


class PrefixCache:
    """Snapshots by the tokens that they stand for, within a limit of memory.

    Args:
        states: the runtime's state arrays; the first axis is the slot.
        block: tokens of an index block.
        limit_bytes: memory for snapshots; 0 keeps none.
    """

    def __init__(self, states: Mapping[str, Array], block: int, limit_bytes: int) -> None:
        self._states, self._block, self._limit = states, block, limit_bytes
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._lengths: dict[int, int] = {}
        """How many snapshots there are of each length."""
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.used_bytes = 0

    @property
    def on(self) -> bool:
        """Whether anything is ever kept."""
        return self._limit > 0

    def save_chunk(self, sequence: Sequence) -> None:
        """Save the end of a chunk of a prompt, if another prompt has come to the same one before."""
        if not self._limit:
            return
        key = _key(sequence.tokens, sequence.past, False)
        if key in self._seen:
            self.save(sequence)
        self._seen[key] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def save(self, sequence: Sequence) -> None:
        """Save what a running sequence's slot holds; nothing when it is known or larger than the limit."""
        key = _key(sequence.tokens, sequence.past, sequence.fed == sequence.past)
        if not self._limit or sequence.past == 0 or self._touch(key):
            return
        assert sequence.slot is not None
        parts = {name: array[sequence.slot][: self._used(name, sequence)] for name, array in self._states.items()}
        if sum(part.nbytes for part in parts.values()) > self._limit:
            return
        states = {name: part.copy() for name, part in parts.items()}
        snapshot = Snapshot(sequence.past, sequence.pending, sequence.fed, states)
        self._snapshots[key] = snapshot
        self._lengths[snapshot.past] = self._lengths.get(snapshot.past, 0) + 1
        self.used_bytes += snapshot.nbytes
        while self.used_bytes > self._limit:
            self._forget(next(iter(self._snapshots)))

    def restore(self, sequence: Sequence) -> None:
        """Give a sequence that has just got its slot the longest start that is known; at least one token is left."""
        for length in sorted(self._lengths, reverse=True):
            if length >= len(sequence.tokens):
                continue
            # Without drafts it does not matter whether the draft layer has kept up.
            keys = [_key(sequence.tokens, length, fed) for fed in ((True,) if sequence.drafted else (True, False))]
            key = next((k for k in keys if self._touch(k)), None)
            if key is not None:
                self._fill(sequence, self._snapshots[key])
                return

    def _fill(self, sequence: Sequence, snapshot: Snapshot) -> None:
        for name, part in snapshot.states.items():
            self._states[name][sequence.slot][: len(part)] = part
        sequence.past, sequence.pending, sequence.fed = snapshot.past, snapshot.pending, snapshot.fed
        sequence.cached = snapshot.past

    def clear(self) -> None:
        """Forget everything."""
        self._snapshots.clear()
        self._lengths.clear()
        self._seen.clear()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._snapshots)

    def _touch(self, key: bytes) -> bool:
        """Whether a snapshot is known; it counts as used."""
        if key not in self._snapshots:
            return False
        self._snapshots.move_to_end(key)
        return True

    def _forget(self, key: bytes) -> None:
        snapshot = self._snapshots.pop(key)
        self.used_bytes -= snapshot.nbytes
        self._lengths[snapshot.past] -= 1
        if not self._lengths[snapshot.past]:
            del self._lengths[snapshot.past]

    def _used(self, name: str, sequence: Sequence) -> int | None:
        """Rows of a slot's state that hold something; None for all."""
        kind = name.rsplit(".", 1)[-1]
        tokens = sequence.fed if name.startswith("mtp.") else sequence.past
        if kind in BY_POSITION:
            return tokens
        return tokens // self._block if kind in BY_BLOCK else None


def _key(tokens: list[int], length: int, fed: bool) -> bytes:
    """Stands for the first `length` tokens, and for whether the draft layer has seen them all."""
    return hashlib.sha256(np.array([*tokens[:length], fed], np.int64).tobytes()).digest()
