"""Where kernels are timed: a GPU with CUDA graphs and events, or the host execution behind the same interface.

The host's times say nothing about a GPU; it is there so that everything around the launches can be run and tested
without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from flashnext.export.errors import EngineError
from flashnext.plugins.device_library import DeviceKernels
from flashnext.plugins.host_library import Execution, HostKernels
from flashnext.runtime.engines.torch_kernels import Workspace


class Backend(Protocol):
    """Launches and times work on one device."""

    name: str
    device: torch.device
    rotate_bytes: int
    """What the copies of a case's buffers move together: far more than the caches hold."""
    most_copies: int
    memory_bytes: int
    """What the copies may take together."""
    copy_bytes: int
    round_seconds: float
    """How long a round of replays is to take."""

    def launch(self, op: str, values: Mapping[str, Any]) -> None:
        """Queue one launch."""

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Something that does the work again, at the least cost."""

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Time of the work, mean of so many in a row."""

    def release(self) -> None:
        """Give back memory that nobody holds any more."""


class Device:
    """The first GPU."""

    most_copies, memory_bytes, copy_bytes, round_seconds = 64, 60 << 30, 2 << 30, 0.05

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise EngineError("PyTorch sees no GPU here. Use --on host to try this without one.")
        self.name = torch.cuda.get_device_name()
        self.device = torch.device("cuda")
        self.rotate_bytes = max(512 << 20, 8 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._kernels = DeviceKernels.load(Workspace(self.device))

    def launch(self, op: str, values: Mapping[str, Any]) -> None:
        """On the current stream, which is another one while a graph is captured."""
        self._kernels.launch(op, values, torch.cuda.current_stream().cuda_stream)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """A CUDA graph. The work has run before, so that nothing is loaded and no workspace grows inside."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = work()  # outputs of products: their memory belongs to the graph
        return lambda: (graph.replay(), kept)

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """By events around them."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    def release(self) -> None:
        torch.cuda.empty_cache()


class Host:
    """The host execution."""

    name = "host execution"
    rotate_bytes, most_copies, memory_bytes, copy_bytes, round_seconds = 1 << 16, 2, 1 << 28, 1 << 22, 0.0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._kernels = HostKernels.load()

    def launch(self, op: str, values: Mapping[str, Any]) -> None:
        self._kernels.launch(op, values, Execution(schedule="forward"))

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        return work

    def seconds(self, work: Callable[[], object], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times

    def release(self) -> None:
        """Nothing is kept."""


BACKENDS: dict[str, Callable[[], Backend]] = {"device": Device, "host": Host}
