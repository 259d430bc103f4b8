"""Finds the programs of the CUDA toolkit 13, which may come from a toolkit or from wheels of PyPI.

    python -m flashnext.plugins.cuda_tools nvcc          # prints its path, or says how to get it

Looked at in turn: the PATH, the toolkit that $CUDA_HOME or $CUDA_PATH names, /usr/local/cuda*, and the wheels of this
Python environment (their folder is site-packages/nvidia/cu13).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashnext.export.errors import PluginError

PACKAGES = {
    "nvcc": "nvidia-cuda-nvcc nvidia-cuda-cccl",
    "cuobjdump": "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm",
    "compute-sanitizer": "nvidia-cuda-sanitizer-api",
}
"""What brings each program, from PyPI. nvcc's headers include some of CCCL's; cuobjdump calls nvdisasm."""


def find_tool(name: str) -> Path:
    """Path of "nvcc", "cuobjdump" or "compute-sanitizer".

    Raises:
        PluginError: it is nowhere; says how to get it.
    """
    found = shutil.which(name)
    candidates = [Path(found)] if found else [folder / "bin" / name for folder in toolkits()]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise PluginError(
        f"{name} of the CUDA toolkit 13 is not here. Put the toolkit's bin folder on the PATH, or run: "
        f"pip install {PACKAGES[name]}"
    )


def toolkits() -> Iterator[Path]:
    """Folders that are laid out like a CUDA toolkit (bin, include), whether they exist or not."""
    yield from (Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name))
    yield from (Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-13*")))
    yield from wheels()


def wheels() -> Iterator[Path]:
    """The folder that NVIDIA's wheels share, in every place where packages are installed."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    yield from (Path(place) / "cu13" for place in places or ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of the program that is asked for."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 1 or names[0] not in PACKAGES:
        print(f"usage: python -m flashnext.plugins.cuda_tools {'|'.join(PACKAGES)}", file=sys.stderr)
        return 2
    try:
        print(find_tool(names[0]))
    except PluginError as error:
        print(f"cuda_tools: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
