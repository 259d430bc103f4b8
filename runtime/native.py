"""Native code of the runtime: single C++ sources that g++ compiles on first use, into the cache folder of the kernels'
host execution.

    library = load("ngram-rows", SOURCE)   # None where it is not wanted or cannot be compiled

`FLASHNEXT_NATIVE=0` in the environment does without. Whoever loads something works without it too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from flashnext.export.errors import PluginError
from flashnext.plugins.host_build import cache_folder, compiler, make, source_key

FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")


def load(name: str, source: Path) -> ctypes.CDLL | None:
    """The compiled library, or None where it is not wanted or cannot be compiled."""
    if os.environ.get("FLASHNEXT_NATIVE", "1") == "0":
        return None
    try:
        return ctypes.CDLL(str(build(name, source, FLAGS)))
    except (PluginError, OSError):  # no compiler, no place for its result, or not for this machine
        return None


def build(name: str, source: Path, flags: Sequence[str]) -> Path:
    """The library compiled with these flags.

    Raises:
        PluginError: there is no compiler, or it fails.
    """
    path, version = compiler()
    target = cache_folder() / f"{name}-{source_key(source, [version, *flags])}.so"
    return make(target, [path, *flags, str(source)])
