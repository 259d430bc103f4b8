"""A `Device` in plain memory, so that the engine runs without a GPU: to test it, with plans that run on the host.

It is as unkind as a GPU may be. Work that is queued runs when something waits for it and no sooner, or, with a seed, at
any moment between; either way a host that reads a result before waiting, overwrites what a copy has still to read, or
lets two streams race gets wrong numbers here too. Memory that was released is filled and may not be used again.

    device = HostDevice(seed=1)
    device.queue(stream, work)     # what a plan puts on a stream
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.tensorrt.device import ALIGNMENT, Memory

Work = Callable[[], None]
RELEASED = 0xFF
"""Byte that released memory is filled with: NaN in every floating-point format."""


class HostDevice:
    """See `Device`.

    Args:
        seed: run queued work at moments that this seed chooses; None: as late as possible.
        capability: what it claims to be.
        total_bytes: memory that it has.
    """

    def __init__(self, seed: int | None = None, capability: int = 90, total_bytes: int = 1 << 40) -> None:
        self.name, self.capability = "host", capability
        self.launches = 0
        """How many graphs were launched."""
        self._random = None if seed is None else random.Random(seed)
        self._left = total_bytes
        self._blocks: dict[int, tuple[Memory, NDArray[np.uint8]]] = {}
        self._released: list[tuple[Memory, NDArray[np.uint8]]] = []
        self._pinned: dict[int, Memory] = {}
        self._streams: dict[int, deque[Work]] = {}
        self._recorded: dict[int, tuple[int, int]] = {}
        self._reached: dict[int, int] = {}
        self._graphs: dict[int, list[Work]] = {}
        self._captured: dict[int, list[Work]] = {}
        self._handles = 0

    # --- memory ---------------------------------------------------------------

    def free_bytes(self) -> int:
        return self._left

    def allocate(self, nbytes: int) -> Memory:
        if nbytes > self._left:
            raise EngineError(f"There is no device memory of {nbytes:,} bytes.")
        self._left -= nbytes
        return self._block(nbytes, pinned=False)

    def allocate_pinned(self, nbytes: int) -> Memory:
        return self._block(nbytes, pinned=True)

    def _block(self, nbytes: int, pinned: bool) -> Memory:
        storage = np.zeros(nbytes + ALIGNMENT, np.uint8)
        start = -storage.ctypes.data % ALIGNMENT
        memory = Memory(storage.ctypes.data + start, nbytes, pinned)
        self._blocks[memory.address] = memory, storage
        return memory

    def release(self, memory: Memory) -> None:
        if block := self._blocks.pop(memory.address, None):
            block[1].fill(RELEASED)
            self._released.append(block)
            self._left += 0 if memory.pinned else memory.nbytes

    def pin(self, address: int, nbytes: int) -> int:
        self._pinned[address] = Memory(address, nbytes, pinned=True)
        return address

    def unpin(self, address: int) -> None:
        if any(self._streams.values()):
            raise RuntimeError(f"The memory at {address:#x} is unpinned while work is queued that may read it.")
        del self._pinned[address]

    @property
    def blocks(self) -> int:
        """How many blocks of memory have not been released, or unpinned."""
        return len(self._blocks) + len(self._pinned)

    def check_live(self, address: int, nbytes: int) -> None:
        """Raise a RuntimeError if any of these bytes were released."""
        for memory, _ in self._released:
            if address < memory.address + memory.nbytes and memory.address < address + nbytes:
                raise RuntimeError(f"{nbytes:,} bytes at {address:#x} lie in released memory.")

    # --- streams and events -----------------------------------------------------

    def new_stream(self) -> int:
        self._handles += 1
        self._streams[self._handles] = deque()
        return self._handles

    def new_event(self) -> int:
        self._handles += 1
        return self._handles

    def queue(self, stream: int, work: Work) -> None:
        """Queue any work."""
        if stream in self._captured:
            self._captured[stream].append(work)
        else:
            self._streams[stream].append(work)
            self._run_some()

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        def work() -> None:
            self.check_live(target, nbytes)
            self.check_live(source, nbytes)
            ctypes.memmove(target, source, nbytes)

        self.queue(stream, work)

    def record(self, event: int, stream: int) -> None:
        self._handles += 1
        number = self._handles
        self._recorded[event] = stream, number
        self.queue(stream, lambda: self._reach(event, number))

    def wait(self, stream: int, event: int) -> None:
        if event in self._recorded:
            recorded = self._recorded[event]  # as it is now; later records are none of this wait's business
            self.queue(stream, lambda: self._run_until(event, *recorded))

    def synchronize(self, stream: int) -> None:
        while self._streams[stream]:
            self._streams[stream].popleft()()

    def synchronize_event(self, event: int) -> None:
        if event in self._recorded:
            self._run_until(event, *self._recorded[event])

    def _reach(self, event: int, number: int) -> None:
        self._reached[event] = max(number, self._reached.get(event, 0))

    def _run_until(self, event: int, stream: int, number: int) -> None:
        while self._reached.get(event, 0) < number:
            self._streams[stream].popleft()()

    def _run_some(self) -> None:
        """With a seed: run a few of the next works of any stream."""
        while self._random and self._random.random() < 0.5:
            waiting = [works for works in self._streams.values() if works]
            if not waiting:
                return
            self._random.choice(waiting).popleft()()

    # --- graphs -----------------------------------------------------------------

    def capture(self, stream: int, queue: Work) -> int:
        self.begin_capture(stream)
        try:
            queue()
        finally:
            graph = self.end_capture(stream)
        return graph

    def begin_capture(self, stream: int) -> None:
        """Keep what is queued on the stream from now on for a graph."""
        self._captured[stream] = []

    def end_capture(self, stream: int) -> int:
        """The graph of what was queued since."""
        self._handles += 1
        self._graphs[self._handles] = self._captured.pop(stream)
        return self._handles

    def launch(self, graph: int, stream: int) -> None:
        self.launches += 1
        for work in self._graphs[graph]:
            self.queue(stream, work)

    def release_graph(self, graph: int) -> None:
        del self._graphs[graph]

    def close(self) -> None:
        for memory in [memory for memory, _ in self._blocks.values() if not memory.pinned]:
            self.release(memory)
        self._streams.clear()
        self._graphs.clear()
