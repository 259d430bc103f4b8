"""Hand-made events of a model that does not exist."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flashnext.calibration.residual.stream import Listener, Read, Reader, Store


def feed(listener: Listener, r: Tensor, update: Tensor | None, following: Tensor, reader: Reader, store: str) -> None:
    """Show branches [N, n, H] that are stored after a write, and what is read next (one window of N tokens)."""
    before = None if update is None else (r - update)[None]
    listener.begin(np.zeros((1, len(r)), np.int32))
    listener.store(Store(store, before, r[None], None, None))
    listener.read(Read("after", following[None], reader(following)[None], None, reader, None))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
