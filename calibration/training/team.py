"""Workers that train together: each runs its share of every batch, gradients are averaged, all take the same step.

Several processes of one thread each use shared cores better than one process of several threads, whose every small
product waits for the slowest thread. With one worker nothing is communicated.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn


class Team:
    """This process's place among the workers."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this worker writes files and talks."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This worker's rows of a batch."""
        return batch[self.rank :: self.size]

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by the workers' mean: one message for all of them."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.size
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def start(work: Callable[[Team], None], workers: int, meeting: Path) -> None:
    """Run `work` in this process, or in several; `meeting` is a file that they find each other by."""
    if workers == 1:
        work(Team())
        return
    meeting.unlink(missing_ok=True)
    # A terminated parent takes its workers along: daemons end when it exits, but not when a signal kills it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    spawn(_worker, (work, workers, str(meeting)), nprocs=workers, daemon=True)


def _worker(rank: int, work: Callable[[Team], None], size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    work(Team(rank, size))
    torch.distributed.destroy_process_group()
