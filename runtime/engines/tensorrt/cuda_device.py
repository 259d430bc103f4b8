"""A real GPU, through `cuda-bindings`: the CUDA runtime's own functions, each status checked.

The first visible GPU is taken (CUDA_VISIBLE_DEVICES chooses another). Nothing here has run on a GPU yet: every call is
checked against the signatures of the installed cuda-bindings, and executed with its functions played on the host
(tests/runtime/engines/tensorrt/cuda_on_host.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.tensorrt.device import Memory


class CudaDevice:
    """See `Device`.

    Args:
        runtime: the module `cuda.bindings.runtime`.
        asked_by, instead: for the error's sentence: what needs the GPU, and what does without one.

    Raises:
        EngineError: cuda-bindings is not installed, or there is no GPU or driver.
    """

    def __init__(
        self,
        runtime: ModuleType | Any | None = None,
        asked_by: str = "The TensorRT engine",
        instead: str = "choose --engine onnxruntime",
    ) -> None:
        self._cuda = runtime or _bindings(asked_by, instead)
        self._memory: dict[int, Memory] = {}
        self._streams: list[int] = []
        self._events: list[int] = []
        self._graphs: set[int] = set()
        failure = f"{asked_by} needs a GPU and its driver (without one, {instead})"
        if not self._call("cudaGetDeviceCount", failure=failure):
            raise EngineError(f"{asked_by} needs a GPU, and CUDA sees none. Make one visible, or {instead}.")
        self._call("cudaSetDevice", 0)
        attributes = self._cuda.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, 0)
        minor = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, 0)
        self.capability = 10 * int(major) + int(minor)
        self.name = _text(self._call("cudaGetDeviceProperties", 0).name)

    def free_bytes(self) -> int:
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def allocate(self, nbytes: int) -> Memory:
        failure = f"There is no device memory of {nbytes:,} bytes"
        address = int(self._call("cudaMalloc", max(nbytes, 1), failure=failure))
        memory = self._memory[address] = Memory(address, nbytes)
        # On the default stream, which the streams made here do not wait for: so the host does.
        self._call("cudaMemset", address, 0, nbytes)
        self._call("cudaDeviceSynchronize")
        return memory

    def allocate_pinned(self, nbytes: int) -> Memory:
        flags = self._cuda.cudaHostAllocPortable | self._cuda.cudaHostAllocMapped
        failure = f"The system has no pinned memory of {nbytes:,} bytes"
        address = int(self._call("cudaHostAlloc", max(nbytes, 1), flags, failure=failure))
        memory = self._memory[address] = Memory(address, nbytes, pinned=True)
        return memory

    def release(self, memory: Memory) -> None:
        # A status that is passed over, here and where graphs are released: it tells of a failure before, which has been
        # reported, and what else is to be let go should be.
        if self._memory.pop(memory.address, None):
            (self._cuda.cudaFreeHost if memory.pinned else self._cuda.cudaFree)(memory.address)

    def pin(self, address: int, nbytes: int) -> int:
        flags = self._cuda.cudaHostRegisterPortable | self._cuda.cudaHostRegisterMapped
        self._call("cudaHostRegister", address, nbytes, flags, failure=f"CUDA cannot pin {nbytes:,} bytes")
        return int(self._call("cudaHostGetDevicePointer", address, 0))

    def unpin(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def new_stream(self) -> int:
        # Work of the default stream would wait for streams without this flag, and they for it.
        self._streams.append(int(self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)))
        return self._streams[-1]

    def new_event(self) -> int:
        self._events.append(int(self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)))
        return self._events[-1]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cudaMemcpyAsync", target, source, nbytes, self._cuda.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        work()

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    def synchronize_event(self, event: int) -> None:
        self._call("cudaEventSynchronize", event)

    def capture(self, stream: int, queue: Callable[[], None]) -> int:
        # Thread-local: what other threads do meanwhile (reading n-gram rows) cannot break the capture.
        self._call("cudaStreamBeginCapture", stream, self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            queue()
        except BaseException:
            self._discard(self._cuda.cudaStreamEndCapture(stream))  # the stream must not stay in capture
            raise
        captured = self._call("cudaStreamEndCapture", stream)
        try:
            graph = int(self._call("cudaGraphInstantiate", captured, 0))
        finally:
            self._call("cudaGraphDestroy", captured)
        self._graphs.add(graph)
        return graph

    def launch(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def release_graph(self, graph: int) -> None:
        self._graphs.discard(graph)
        self._cuda.cudaGraphExecDestroy(graph)

    def close(self) -> None:
        """After an error that CUDA does not recover from, every call fails; that is passed over."""
        cuda = self._cuda
        for graph in self._graphs:
            cuda.cudaGraphExecDestroy(graph)
        for event in self._events:
            cuda.cudaEventDestroy(event)
        for stream in self._streams:
            cuda.cudaStreamDestroy(stream)
        for address in [m.address for m in self._memory.values() if not m.pinned]:
            cuda.cudaFree(address)
            del self._memory[address]
        self._graphs, self._events, self._streams = set(), [], []

    def _discard(self, ended: tuple[Any, ...]) -> None:
        """Forget the graph of a capture that failed, if there is one."""
        if not int(ended[0]) and len(ended) > 1 and ended[1] is not None:
            self._cuda.cudaGraphDestroy(ended[1])

    def _call(self, name: str, *arguments: Any, failure: str = "") -> Any:
        """Call a function of the CUDA runtime: its result, its results as a tuple, or None."""
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise EngineError(f"{failure or f'{name} failed'}: {_reason(self._cuda, status)}.")
        return results[0] if len(results) == 1 else tuple(results) or None


def _bindings(asked_by: str, instead: str) -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as cause:
        raise EngineError(
            f"{asked_by} needs cuda-bindings ({cause}). Install it (pip install 'flashnext-trt[tensorrt]'), "
            f"or {instead}."
        ) from None
    return runtime


def _reason(cuda: Any, status: Any) -> str:
    """CUDA's name for a status, and its sentence."""
    _, sentence = cuda.cudaGetErrorString(status)
    return f"{getattr(status, 'name', status)} ({_text(sentence)})"


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace").rstrip("\0") if isinstance(value, bytes) else str(value)
