"""Launches kernels of the plugin library directly, between the plans' runs.

The library that TensorRT loads for its plugins exports the kernels' own C interface too (plugins/abi.h), so nothing
else is compiled or loaded. A launch is queued on a stream of the session and can be captured in a CUDA graph:

    kernels = Kernels(device, library)                    # the session's: `session.kernels`, None without plugins
    launch = kernels.prepare("candidates", {"logits": logits, "values": values, "inverse_temperature": 1.0}, stream)
    launch()                                              # queues it and returns at once; again and again

Values are what the op's params.h names: `DeviceArray`s, numpy arrays over pinned memory (which a device can address),
and plain numbers for attributes. Preparing checks shapes and dtypes and takes tens of microseconds; launching takes
two, so a launch is kept for every set of shapes and addresses that comes up again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashnext.export.errors import EngineError, PluginError
from flashnext.plugins.kernel_library import KernelError, KernelLibrary, raise_for
from flashnext.plugins.params import SOURCES
from flashnext.runtime.engines.tensorrt.device import Device, Memory


class Kernels:
    """The kernels of one plugin library on one device.

    Launches of a stream run one after another and share a workspace. What it had is kept when it grows, because
    launches, and graphs that were captured of them, hold its address; the device releases all of it when it is closed.
    """

    def __init__(self, device: Device, library: Path) -> None:
        """Raises an EngineError if the library cannot be loaded."""
        self._device, self._path = device, library
        try:
            self._library = KernelLibrary(library, SOURCES)
        except OSError as cause:
            raise EngineError(f"The kernels of {library} cannot be loaded: {cause}.") from None
        self._workspaces: dict[int, Memory] = {}

    def prepare(self, op: str, values: Mapping[str, Any], stream: int) -> Launch:
        """A launch of `op` (the name of its folder under plugins/) on a stream. It keeps the arrays.

        Not to be called while the stream is captured: it may allocate.

        Raises:
            EngineError: the values do not fit the op, the library is another version's, or there is no memory.
        """
        try:
            self._library.params(op)
        except PluginError:
            raise EngineError(
                f"The plugin library {self._path} has no kernel {op}, or another version's. Build it and the engine "
                "again: flashnext plugins build, then flashnext build BUNDLE --engine tensorrt."
            ) from None
        try:
            struct, _ = self._library.prepare(op, values, lambda size: self._workspace(size, stream))
        except PluginError as cause:
            raise EngineError(f"The kernel {op} cannot be launched: {cause}") from None
        struct.stream = stream
        return Launch(self._device, self._library, op, struct, stream, dict(values))

    def _workspace(self, size: int, stream: int) -> Memory:
        held = self._workspaces.get(stream)
        if held is None or held.nbytes < size:
            held = self._workspaces[stream] = self._device.allocate(max(size, 2 * held.nbytes if held else 0))
        return held


class Launch:
    """One prepared launch; calling it queues the kernels."""

    def __init__(
        self,
        device: Device,
        library: KernelLibrary,
        op: str,
        struct: ctypes.Structure,
        stream: int,
        values: Mapping[str, Any],
    ) -> None:
        self._device, self._library, self._op, self._struct, self._stream = device, library, op, struct, stream
        self._values = values  # the struct holds bare addresses

    def __call__(self) -> None:
        """Queue it.

        Raises:
            EngineError: the kernels refuse the values, or CUDA refuses the launch.
        """
        self._device.queue(self._stream, self._launch)

    def _launch(self) -> None:
        try:
            raise_for(*self._library.call(self._op, self._struct))
        except (PluginError, KernelError) as cause:
            raise EngineError(f"The kernel {self._op} cannot be launched: {cause}") from None
