"""The library that nvcc builds: what it exports and needs, and in TensorRT's registry. Nothing of it runs here.

Slow, and only where nvcc is at hand: kernels for one target take a minute of a core.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_registry import check_registry

from flashnext.export.errors import PluginError
from flashnext.plugins.cuda_tools import find_tool
from flashnext.plugins.tensorrt import library
from flashnext.plugins.tensorrt.headers import Headers

pytest.importorskip("tensorrt_lean_bindings")
TARGET = "90"
OF_TENSORRT = {"getCreators", "setLoggerFinder"}
OF_KERNELS = {"flashnext_launch", "flashnext_message", "flashnext_params_size", "flashnext_workspace"}
"""abi.h: the engine launches kernels by these from the library that TensorRT has loaded."""


@pytest.fixture(scope="module")
def device_plugins(headers: Headers) -> library.LibraryInfo:
    try:
        find_tool("nvcc")
    except PluginError as error:
        pytest.skip(str(error))
    return library.build([TARGET], headers.folder)


@pytest.mark.slow
def test_registry(device_plugins: library.LibraryInfo, tmp_path: Path) -> None:
    check_registry(device_plugins.path, tmp_path)


@pytest.mark.slow
def test_what_the_file_says(device_plugins: library.LibraryInfo, headers: Headers) -> None:
    assert device_plugins == library.check(device_plugins.path)
    assert (device_plugins.capabilities, device_plugins.tensorrt_headers) == ((TARGET,), headers.version)
    assert library.find(TARGET) == device_plugins


@pytest.mark.slow
def test_exports_and_needs(device_plugins: library.LibraryInfo) -> None:
    """Only what TensorRT looks for and the kernels' C interface; no TensorRT, no CUDA runtime."""
    check_symbols(device_plugins.path)


def test_exports_and_needs_of_the_host_library(host_plugins: library.LibraryInfo) -> None:
    check_symbols(host_plugins.path, "simt_")


def check_symbols(path: Path, more: str = "flashnext_") -> None:
    if not shutil.which("nm") or not shutil.which("readelf"):
        pytest.skip("no binutils")
    names = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1] for line in names.splitlines() if line.split()[1] in "TDBR"}
    assert exported >= OF_TENSORRT | OF_KERNELS
    assert {n for n in exported - OF_TENSORRT if not n.startswith(("flashnext_", more))} == set()
    sections = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.+?)\]", sections)
    assert {n.split(".")[0] for n in needed} <= {
        *("libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt"),
        *("ld-linux-x86-64", "ld-linux-aarch64"),
    }
