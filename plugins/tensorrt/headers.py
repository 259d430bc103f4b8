"""Finds TensorRT's C++ headers, which a plugin library is compiled with.

    python -m flashnext.plugins.tensorrt.headers         # prints their folder, or says how to get them

Looked at in turn: $TENSORRT_INCLUDE_DIR, the system's include folders, and the wheel kernel-lens, which bundles those
of TensorRT 10.14. A library works with another TensorRT than that of its headers (docs/tensorrt.md: what was tried).
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashnext.export.errors import PluginError
from flashnext.plugins.cuda_tools import toolkits

MAIN, VERSION = "NvInferRuntime.h", "NvInferVersion.h"
SYSTEM = ("/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu", "/usr/include", "/usr/local/include")
NUMBER = re.compile(r"^#define (?:NV_TENSORRT|TRT)_(MAJOR|MINOR|PATCH)(?:_ENTERPRISE)? (\d+)", re.MULTILINE)
OLDEST = (10, 14)
"""The oldest that was tried."""
REMEDY = (
    "Set TENSORRT_INCLUDE_DIR to the include folder of a TensorRT, or run: pip install --no-deps kernel-lens "
    "(which bundles the headers of TensorRT 10.14)."
)


@dataclass(frozen=True)
class Headers:
    """A folder of TensorRT's headers, and their version ("11.1.0")."""

    folder: Path
    version: str


def find_headers() -> Headers:
    """The headers to compile with.

    Raises:
        PluginError: there are none, or those of $TENSORRT_INCLUDE_DIR cannot be used; says how to get some.
    """
    named = os.environ.get("TENSORRT_INCLUDE_DIR")
    if named:
        return read_headers(Path(named))
    for folder in _places():
        if (folder / MAIN).is_file() and (folder / VERSION).is_file():
            return read_headers(folder)
    raise PluginError(f"TensorRT's C++ headers ({MAIN}) are not here. {REMEDY}")


def read_headers(folder: Path) -> Headers:
    """The headers in a folder.

    Raises:
        PluginError: they are not there, or older than the plugins' interfaces.
    """
    missing = [name for name in (MAIN, VERSION) if not (folder / name).is_file()]
    if missing:
        raise PluginError(f"{folder} does not hold TensorRT's headers: {', '.join(missing)} is missing. {REMEDY}")
    found = dict(NUMBER.findall((folder / VERSION).read_text(encoding="utf-8", errors="replace")))
    if set(found) != {"MAJOR", "MINOR", "PATCH"}:
        raise PluginError(f"{folder / VERSION} does not say TensorRT's version in a known form. {REMEDY}")
    version = tuple(int(found[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    text = ".".join(map(str, version))
    if version < OLDEST:
        raise PluginError(f"{folder} holds the headers of TensorRT {text}; the plugins need 10.14 or newer. {REMEDY}")
    return Headers(folder, text)


def _places() -> Iterator[Path]:
    yield from map(Path, SYSTEM)
    yield from (toolkit / "include" for toolkit in toolkits())
    spec = importlib.util.find_spec("kernel_lens")
    yield from (Path(place) / "include/tensorrt" for place in (spec.submodule_search_locations if spec else None) or ())


def main() -> int:
    """Print the folder of the headers."""
    try:
        headers = find_headers()
    except PluginError as error:
        print(f"headers: {error}", file=sys.stderr)
        return 2
    print(f"{headers.folder} (TensorRT {headers.version})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
