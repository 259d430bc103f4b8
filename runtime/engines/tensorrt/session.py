"""What the graphs of a bundle share on a device: streams, scratch memory, pinned memory for results.

Steps run one after another on one stream, so one block of scratch memory serves all contexts. What comes from the host
beside them (n-gram rows) is copied on a second stream. Results are copied into pinned memory that numpy arrays own and
give back when the last of them is gone: no second copy, and no result that a later step overwrites.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError
from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.tensorrt.arrays import Buffer, DeviceArray
from flashnext.runtime.engines.tensorrt.device import Device, Memory
from flashnext.runtime.engines.tensorrt.kernels import Kernels
from flashnext.runtime.engines.tensorrt.plan import Context, Library


class Session:
    """A device at work for one bundle.

    `kernels` are those of its plugin library; None without one (TensorRT for RTX).
    """

    def __init__(self, device: Device, library: Library, kernels: Kernels | None = None) -> None:
        self.device, self.library, self.kernels = device, library, kernels
        self.stream, self.side = device.new_stream(), device.new_stream()
        self._contexts: list[Context] = []
        self._scratch_bytes = 0
        self._scratch: Memory | None = None
        self._pool = PinnedPool(device)

    def array(self, shape: Sequence[int], dtype: np.dtype[Any], pinned: bool = False) -> DeviceArray:
        """Zeros that stay, in device memory or in pinned host memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self.device.allocate_pinned(nbytes) if pinned else self.device.allocate(nbytes)
        return DeviceArray(self.device, self.stream, memory.address, shape, dtype)

    def upload(self, values: Array) -> DeviceArray:
        """A copy of an array that stays in device memory."""
        array = self.array(values.shape, values.dtype)
        array[:] = values
        return array

    def buffer(self, nbytes: int) -> Buffer:
        """Memory for a result that each step makes anew."""
        return Buffer(self.device.allocate(nbytes))

    def attach(self, context: Context, scratch_bytes: int) -> None:
        """Let a context use the shared scratch memory."""
        self._contexts.append(context)
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)

    def settle(self) -> None:
        """Allocate the scratch memory once all contexts are known.

        Raises:
            EngineError: there is not enough memory.
        """
        free = self.device.free_bytes()
        if self._scratch_bytes > free:
            raise EngineError(
                f"A step needs {self._scratch_bytes / 1e9:.2f} GB of scratch memory, and {free / 1e9:.2f} GB of the "
                f"device's are free. Build the engine for shorter chunks of a prompt or fewer sequences, or export the "
                "bundle with fewer --slots or less --capacity."
            )
        self._scratch = self.device.allocate(self._scratch_bytes)
        for context in self._contexts:
            context.set_scratch(self._scratch)

    def result(self, source: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Queue the copy of a result to the host; it can be read once the stream has been waited for."""
        array, address = self._pool.array(shape, dtype)
        self.device.copy(address, source, array.nbytes, self.stream)
        return array

    def drain(self) -> None:
        """Wait for all work; a device that has failed has none left."""
        with contextlib.suppress(EngineError):
            self.device.synchronize(self.stream)
            self.device.synchronize(self.side)

    def close(self) -> None:
        """Release streams, graphs and device memory."""
        self.drain()
        self._contexts.clear()
        self._pool.close()
        self.device.close()


class PinnedPool:
    """Pinned blocks by size, used again when the arrays over them are gone."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: dict[int, list[Memory]] = {}
        self._closed = False

    def array(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Array, int]:
        """An array that owns a block, and its address."""
        size = math.prod(shape) * dtype.itemsize
        room = 1 << max(size - 1, 4095).bit_length()  # powers of two, so that few sizes come up
        idle = self._idle.setdefault(room, [])
        memory = idle.pop() if idle else self._device.allocate_pinned(room)
        values: NDArray[np.uint8] = np.asarray(_Lease(self, memory))
        return values[:size].view(dtype).reshape(shape), memory.address

    def take_back(self, memory: Memory) -> None:
        """A block whose arrays are gone."""
        if self._closed:
            with contextlib.suppress(EngineError):
                self._device.release(memory)
        else:
            self._idle.setdefault(memory.nbytes, []).append(memory)

    def close(self) -> None:
        """Release the idle blocks; the others follow when their arrays are gone."""
        self._closed = True
        for blocks in self._idle.values():
            for memory in blocks:
                self.take_back(memory)
        self._idle.clear()


class _Lease:
    """Owner of one block; numpy reads `__array_interface__` and keeps the owner alive."""

    def __init__(self, pool: PinnedPool, memory: Memory) -> None:
        self._pool, self._memory = pool, memory
        self.__array_interface__ = array_interface(memory)

    def __del__(self) -> None:
        self._pool.take_back(self._memory)


def array_interface(memory: Memory) -> dict[str, Any]:
    """numpy's description of a block that the host can address, as bytes."""
    return {"shape": (memory.nbytes,), "typestr": "|u1", "data": (memory.address, False), "version": 3}


class HostView:
    """The bytes of a pinned block, as numpy sees them: `np.asarray(HostView(memory))`. Owns nothing."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = array_interface(memory)
