"""A loaded kernel library, of either build: parameter structs, workspace, the call (abi.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashnext.export.errors import PluginError
from flashnext.plugins.params import Params, address, fill, read_params

REJECTED = 1
"""Status of arguments that the op refuses (common/status.h)."""


class KernelError(Exception):
    """A launch that failed: what CUDA, the host runtime or a sanitizer found."""


class KernelLibrary:
    """The C interface of one library; `folder` holds the ops' params.h."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.folder = folder
        self._library = ctypes.CDLL(str(path))
        self._library.flashnext_workspace.restype = ctypes.c_int64
        self._library.flashnext_params_size.restype = ctypes.c_int64
        self._library.flashnext_message.restype = ctypes.c_char_p
        self._params: dict[str, Params] = {}

    def params(self, op: str) -> Params:
        """The op's parameter struct, checked against the library's idea of it."""
        if op not in self._params:
            params = read_params(op, self.folder)
            found, needed = self._library.flashnext_params_size(op.encode()), ctypes.sizeof(params.struct)
            if found != needed:
                raise PluginError(
                    f"The library's {op} takes {found} bytes of parameters, this package's {needed}: it was built "
                    "from other sources. Build it again (flashnext plugins build), and then the engines that use it."
                )
            self._params[op] = params
        return self._params[op]

    def prepare(
        self, op: str, values: Mapping[str, Any], allocate: Callable[[int], Any]
    ) -> tuple[ctypes.Structure, Any]:
        """The struct for these arrays and attributes, and the workspace, which the caller keeps until the op is done.

        Raises:
            PluginError: the arguments do not fit the op.
        """
        struct = fill(self.params(op), values)
        workspace = allocate(self._library.flashnext_workspace(op.encode(), ctypes.byref(struct)))
        struct.workspace = address(workspace)
        return struct, workspace

    def call(self, op: str, struct: ctypes.Structure) -> tuple[int, str]:
        """Launch; status and message."""
        status = int(self._library.flashnext_launch(op.encode(), ctypes.byref(struct)))
        return status, self._library.flashnext_message().decode() if status else ""


def raise_for(status: int, message: str) -> None:
    """An exception for a status that is not 0."""
    if status == REJECTED:
        raise PluginError(message)
    if status:
        raise KernelError(message)
