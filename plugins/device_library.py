"""Builds the kernels with nvcc for the GPU at hand and launches them on PyTorch's CUDA tensors.

    kernels = DeviceKernels.load(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    kernels.launch("gated_residual", {"r": r, "y": y, …, "eps": 1e-6}, stream=torch.cuda.current_stream().cuda_stream)

Launches are asynchronous, and can be captured in a CUDA graph (with an allocator that hands out memory that stays).
Objects are cached like those of the host execution (host_build.py), one per source and target.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashnext.export.errors import PluginError
from flashnext.plugins.cuda_tools import find_tool
from flashnext.plugins.host_build import (
    MAX_COMPILERS,
    SOURCES,
    cache_folder,
    digest,
    kernel_sources,
    make,
    source_key,
)
from flashnext.plugins.kernel_library import KernelLibrary, raise_for

DRIVER = "libcuda.so.1"
CAPABILITY = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""
FLAGS = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{SOURCES}"]


class DeviceKernels(KernelLibrary):
    """The kernels of all ops on a GPU; `allocate` gives workspace on it."""

    def __init__(self, path: Path, allocate: Callable[[int], Any]) -> None:
        super().__init__(path, SOURCES)
        self._allocate = allocate

    @classmethod
    def load(cls, allocate: Callable[[int], Any], target: str = "") -> DeviceKernels:
        """Build (if need be) and load the kernels for `target` ("90", say; default: the first GPU's).

        Raises:
            PluginError: they cannot be built here.
        """
        return cls(build(target or gpu_target()), allocate)

    def launch(self, op: str, values: Mapping[str, Any], stream: int = 0) -> None:
        """Queue the op on the stream.

        Raises:
            PluginError: the arguments do not fit the op.
            KernelError: the launch failed.
        """
        struct, _ = self.prepare(op, values, self._allocate)
        struct.stream = stream
        raise_for(*self.call(op, struct))


def build(target: str) -> Path:
    """The shared library for one target."""
    nvcc = str(find_tool("nvcc"))
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    flags = [*FLAGS, f"-arch=sm_{target}"]
    folder = cache_folder()

    def compiled(source: Path) -> Path:
        name = f"{source.parent.name}-{source.stem}-sm{target}-{source_key(source, [version, *flags])}.o"
        return make(folder / name, [nvcc, *flags, "-c", str(source)])

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
        objects = list(pool.map(compiled, [SOURCES / "abi.cpp", *kernel_sources()]))
    library = folder / f"kernels-sm{target}-{digest([o.name for o in objects])}.so"
    return make(library, [nvcc, f"-arch=sm_{target}", "-shared", *map(str, objects)])


def gpu_target() -> str:
    """Compute capability of the first GPU that CUDA shows to this process (CUDA_VISIBLE_DEVICES counts), "90" say.

    Asks the driver itself: a container may lack nvidia-smi, which moreover lists GPUs that the process does not see.

    Raises:
        PluginError: there is no driver, or no GPU.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        raise PluginError(
            f"No NVIDIA driver is here ({DRIVER} cannot be loaded). Name a target, or use the host execution."
        ) from None
    device, parts = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    status = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0)
    for part, attribute in zip(parts, CAPABILITY, strict=True):
        status = status or driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
    if status:
        raise PluginError(
            f"The NVIDIA driver shows no GPU (status {status}). Name a target, or use the host execution."
        )
    return "".join(str(part.value) for part in parts)
