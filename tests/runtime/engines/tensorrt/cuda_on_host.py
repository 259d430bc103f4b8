"""The functions of `cuda.bindings.runtime` that the engine calls, played on a HostDevice.

Each call is first bound to the signature of the installed function, so a wrong number of arguments fails here as it
would there, and enumerations must be the real ones; results have the real form (a status, then values). `fail` lets a
function report an error from then on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda.bindings import runtime as real

from flashnext.runtime.engines.tensorrt.device import Memory
from flashnext.runtime.engines.tensorrt.host_device import HostDevice

OK = real.cudaError_t.cudaSuccess


class CudaOnHost:
    """What stands for the module; constants and enumerations are the real ones."""

    def __init__(self, host: HostDevice) -> None:
        self._host = host
        self._memory: dict[int, Memory] = {}
        self.failing: dict[str, Any] = {}
        self.called: list[str] = []

    def fail(self, function: str, error: str) -> None:
        """Let a function answer with this error."""
        self.failing[function] = getattr(real.cudaError_t, error)

    def __getattr__(self, name: str) -> Any:
        thing = getattr(real, name)  # an AttributeError if cuda-bindings has nothing of that name
        if not callable(thing) or inspect.isclass(thing):
            return thing
        return self._checked(name, thing)

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*arguments: Any) -> tuple[Any, ...]:
            signature.bind(*arguments)
            self.called.append(name)
            if name in ("cudaGetErrorString", "cudaGetErrorName"):
                return tuple(function(*arguments))
            if name in self.failing:
                return (self.failing[name], None)
            result = getattr(self, f"_{name}")(*arguments)
            return (OK,) if result is None else (OK, *result) if isinstance(result, tuple) else (OK, result)

        return call

    # --- the device -------------------------------------------------------------------------

    def _cudaGetDeviceCount(self) -> int:  # noqa: N802
        return 1

    def _cudaSetDevice(self, device: int) -> None:  # noqa: N802
        assert device == 0

    def _cudaDeviceGetAttribute(self, attr: Any, device: int) -> int:  # noqa: N802
        major, minor = divmod(self._host.capability, 10)
        return {real.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor: major}.get(attr, minor)

    def _cudaGetDeviceProperties(self, device: int) -> Any:  # noqa: N802
        return SimpleNamespace(name=b"Played GPU")

    def _cudaDeviceSynchronize(self) -> None: ...  # noqa: N802

    # --- memory -----------------------------------------------------------------------------

    def _cudaMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self._host.free_bytes(), 1 << 40

    def _cudaMalloc(self, size: int) -> int:  # noqa: N802
        return self._keep(self._host.allocate(size))

    def _cudaHostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        assert flags == real.cudaHostAllocPortable | real.cudaHostAllocMapped
        return self._keep(self._host.allocate_pinned(size))

    def _keep(self, memory: Memory) -> int:
        self._memory[memory.address] = memory
        return memory.address

    def _cudaFree(self, address: int) -> None:  # noqa: N802
        assert not self._memory[address].pinned
        self._host.release(self._memory.pop(address))

    def _cudaFreeHost(self, address: int) -> None:  # noqa: N802
        assert self._memory[address].pinned
        self._host.release(self._memory.pop(address))

    def _cudaHostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        assert flags == real.cudaHostRegisterPortable | real.cudaHostRegisterMapped
        self._host.pin(ptr, size)

    def _cudaHostGetDevicePointer(self, pHost: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return pHost

    def _cudaHostUnregister(self, ptr: int) -> None:  # noqa: N802
        self._host.unpin(ptr)

    def _cudaMemset(self, address: int, value: int, count: int) -> None:  # noqa: N802
        assert value == 0

    def _cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> None:  # noqa: N802
        assert kind is real.cudaMemcpyKind.cudaMemcpyDefault
        self._host.copy(dst, src, count, stream)

    # --- streams, events, graphs --------------------------------------------------------------

    def _cudaStreamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == real.cudaStreamNonBlocking
        return self._host.new_stream()

    def _cudaEventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == real.cudaEventDisableTiming
        return self._host.new_event()

    def _cudaEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self._host.record(event, stream)

    def _cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        assert flags == 0
        self._host.wait(stream, event)

    def _cudaStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._host.synchronize(stream)

    def _cudaEventSynchronize(self, event: int) -> None:  # noqa: N802
        self._host.synchronize_event(event)

    def _cudaStreamBeginCapture(self, stream: int, mode: Any) -> None:  # noqa: N802
        assert mode is real.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._host.begin_capture(stream)

    def _cudaStreamEndCapture(self, stream: int) -> int:  # noqa: N802
        return self._host.end_capture(stream)

    def _cudaGraphInstantiate(self, graph: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return graph

    def _cudaGraphLaunch(self, graph: int, stream: int) -> None:  # noqa: N802
        self._host.launch(graph, stream)

    def _cudaGraphDestroy(self, graph: int) -> None: ...  # noqa: N802

    def _cudaGraphExecDestroy(self, graph: int) -> None: ...  # noqa: N802

    def _cudaEventDestroy(self, event: int) -> None: ...  # noqa: N802

    def _cudaStreamDestroy(self, stream: int) -> None: ...  # noqa: N802
