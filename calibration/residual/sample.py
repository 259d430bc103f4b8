"""The tokens that scales are searched on: an even sample of all, and for each branch those with the largest values.

Memory is fixed before the run: `EVEN` tokens drawn without replacement (the seed decides, the text does not), the same
for every store, and the `EXTREMES` tokens of each branch whose largest magnitude is highest. In sums over the sample an
extreme token stands for itself and an even one for its share of the rest, so an outlier that one token in many
thousands has counts as often as it occurs: neither missed nor taken for typical.

For each token: the branches r before they are rounded, what was there before the write, and what the next read will
see (`following`: r with the next write in it) together with that read. So the error of the next block's input that a
rounding of r causes can be computed without running the model: read(following + rounded(r) - r) against
read(following).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flashnext.calibration.residual.stream import Listener, Read, Reader, Store
from flashnext.export.config import ModelConfig

EVEN = 1024
EXTREMES = 8
MAX_BYTES = 4 << 30
"""Models too wide for `EVEN` tokens in this much memory get fewer, `LEAST_EVEN` at least."""
LEAST_EVEN = 64


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens of a store, as one branch sees them."""

    r: Tensor
    """[N, n, H] as they are to be rounded"""
    before: Tensor | None
    """[N, n, H] before the write; None where the branches start"""
    following: Tensor | None
    """[N, n, H] at the next read; None when nothing reads this store"""
    reader: Reader | None
    weights: Tensor
    """[N] how many tokens each stands for, float64"""
    positions: Tensor
    """[N] the tokens' positions in their windows"""


class StoreSample:
    """The sample of one store. Parts: 0 r, 1 before, 2 following."""

    def __init__(self, even: int, branches: int, channels: int) -> None:
        self.even = torch.zeros(3, even, branches, channels)
        self.extreme = torch.zeros(3, branches, EXTREMES, branches, channels)
        self.size = torch.full((branches, EXTREMES), -1.0)
        """[n, EXTREMES] the largest magnitude of each extreme token; -1 where there is none yet"""
        self.number = torch.full((branches, EXTREMES), -1, dtype=torch.int64)
        """[n, EXTREMES] the token's number in the whole run"""
        self.starts = True
        self.reader: Reader | None = None

    def tokens(self, branch: int, chosen: Tensor, total: int, length: int) -> Tokens:
        """What branch `branch` has: its extremes and the even sample without them. `chosen` [even] are the latter's
        numbers in the whole run of `total` tokens, in windows of `length`."""
        known = self.number[branch] >= 0
        extreme = self.number[branch][known]
        keep = ~torch.isin(chosen, extreme)
        parts = [torch.cat([self.extreme[i, branch][known], self.even[i][keep]]) for i in range(3)]
        share = (total - len(extreme)) / max(int(keep.sum()), 1)
        weights = torch.cat([torch.ones(len(extreme)), torch.full((int(keep.sum()),), share)]).double()
        read, before = self.reader is not None, None if self.starts else parts[1]
        positions = torch.cat([extreme, chosen[keep]]) % length
        return Tokens(parts[0], before, parts[2] if read else None, self.reader, weights, positions)


class TokenSample(Listener):
    """Collects the sample of every store over a run of `total` tokens."""

    def __init__(self, config: ModelConfig, stores: Sequence[str], total: int, seed: int) -> None:
        self.total = total
        count = min(even_tokens(config, len(stores)), total)
        rng = np.random.default_rng([seed, 1])
        self.chosen = torch.from_numpy(np.sort(rng.choice(total, count, replace=False)))
        self.stores = {name: StoreSample(count, config.hc_count, config.hidden_size) for name in stores}
        self._first = self._next = 0
        self._length = 1
        self._waiting: list[tuple[StoreSample, Tensor]] = []

    def of(self, store: str, branch: int) -> Tokens:
        """The tokens of one branch of a store."""
        return self.stores[store].tokens(branch, self.chosen, self.total, self._length)

    def begin(self, tokens: NDArray[np.int32]) -> None:
        self._first, self._next = self._next, self._next + tokens.size
        self._waiting, self._length = [], tokens.shape[1]
        low, high = np.searchsorted(self.chosen.numpy(), [self._first, self._next])
        self._places = slice(int(low), int(high))
        self._rows = self.chosen[self._places] - self._first

    def read(self, event: Read) -> None:
        """What this read sees is what follows the stores since the last one."""
        r = event.r.flatten(0, -3)
        for sample, newcomers in self._waiting:
            sample.reader = event.reader
            sample.even[2, self._places] = r[self._rows]
            branch, place, row = newcomers.T
            sample.extreme[2, branch, place] = r[row]
        self._waiting = []

    def store(self, event: Store) -> None:
        sample, after = self.stores[event.name], event.after.flatten(0, -3)
        before = None if event.before is None else event.before.flatten(0, -3)
        sample.even[0, self._places] = after[self._rows]
        if before is not None:
            sample.starts = False
            sample.even[1, self._places] = before[self._rows]
        self._waiting.append((sample, self._merge(sample, before, after)))

    def _merge(self, sample: StoreSample, before: Tensor | None, after: Tensor) -> Tensor:
        """Let this batch's largest tokens into the extremes; returns the newcomers [M, 3]: branch, place, row."""
        size = after.abs().amax(-1).T  # [n, T]
        best = size.topk(min(EXTREMES, size.shape[1]), dim=-1)
        newcomers = []
        for branch in range(len(size)):
            for value, row in zip(best.values[branch].tolist(), best.indices[branch].tolist(), strict=True):
                place = int(sample.size[branch].argmin())
                if value <= sample.size[branch, place]:
                    break
                sample.size[branch, place], sample.number[branch, place] = value, self._first + row
                sample.extreme[0, branch, place] = after[row]
                if before is not None:
                    sample.extreme[1, branch, place] = before[row]
                newcomers.append((branch, place, row))
        return torch.tensor(newcomers, dtype=torch.int64).view(-1, 3)


def even_tokens(config: ModelConfig, stores: int) -> int:
    """How many tokens the even sample of a model has."""
    each = 3 * 4 * config.hc_count * config.hidden_size * stores
    return max(min(EVEN, MAX_BYTES // each), LEAST_EVEN)
