"""What the engine needs of a GPU: memory, copies, streams, events, captured graphs.

A small protocol with plain numbers for addresses and handles, so that everything above it is one code. `CudaDevice`
(cuda_device.py) is the real one; `HostDevice` (host_device.py) keeps the same promises in plain memory, and runs a
stream's work as late as a GPU might, so that a missing wait shows on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

ALIGNMENT = 256
"""Bytes that addresses of buffers are multiples of; TensorRT asks for it."""


@dataclass(frozen=True)
class Memory:
    """A block of device memory, or of pinned host memory (which a device can address too)."""

    address: int
    nbytes: int
    pinned: bool = False


class Device(Protocol):
    """One GPU. Streams, events and graphs are handles; 0 is none of them.

    Raises (all methods but `release`, `release_graph` and `close`):
        EngineError: what CUDA reported, in one sentence.
    """

    name: str
    capability: int
    """Compute capability: 90 is 9.0."""

    def free_bytes(self) -> int:
        """Device memory that can be allocated now."""

    def allocate(self, nbytes: int) -> Memory:
        """Device memory, zeroed."""

    def allocate_pinned(self, nbytes: int) -> Memory:
        """Page-locked host memory, which copies need to run beside the host."""

    def release(self, memory: Memory) -> None:
        """Give memory back; nothing may use it any more."""

    def pin(self, address: int, nbytes: int) -> int:
        """Page-lock memory that the host has already, until it is unpinned; where the device finds it."""

    def unpin(self, address: int) -> None:
        """Take that back, by the host's address; the device may not use the memory any more."""

    def new_stream(self) -> int:
        """A queue of work. Work of one stream runs in order, of several at once."""

    def new_event(self) -> int:
        """A mark in a stream that others can wait for."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any two addresses."""

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        """Queue work that is no method here: on a GPU `work` is called at once, and launches kernels on the stream."""

    def record(self, event: int, stream: int) -> None:
        """Queue the event."""

    def wait(self, stream: int, event: int) -> None:
        """Let the stream's later work wait for what was recorded last; an event never recorded does not hold it up."""

    def synchronize(self, stream: int) -> None:
        """Wait on the host for all of a stream's work."""

    def synchronize_event(self, event: int) -> None:
        """Wait on the host for what was recorded last."""

    def capture(self, stream: int, queue: Callable[[], None]) -> int:
        """The work that `queue` puts on the stream as a graph; nothing of it runs."""

    def launch(self, graph: int, stream: int) -> None:
        """Queue a graph's work."""

    def release_graph(self, graph: int) -> None:
        """Forget a graph, once its launches are done."""

    def close(self) -> None:
        """Release everything that is left, but pinned memory, whose owners may still read it."""
