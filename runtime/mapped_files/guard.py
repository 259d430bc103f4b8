"""Loads `bus_errors.cpp`, the handler that lets a process live on when a file that it has mapped is cut short."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from flashnext.runtime import native

SOURCE = Path(__file__).parent / "bus_errors.cpp"


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library, or None: no Linux, no compiler, or no native code wanted (`flashnext.runtime.native`)."""
    library = native.load("bus-errors", SOURCE) if sys.platform == "linux" else None
    if library is not None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        library.flashnext_watch_file.restype = pointer
        library.flashnext_watch_file.argtypes = (ctypes.c_int32, count)
        library.flashnext_unwatch_file.restype = None
        library.flashnext_unwatch_file.argtypes = (pointer,)
        library.flashnext_damaged_file.restype = count
        library.flashnext_damaged_file.argtypes = (pointer, count)
    return library
