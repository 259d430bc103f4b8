"""What is asked of the NVIDIA driver: a library that answers as cuda.h says stands in for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext.plugins.host_build import compiler

DRIVER = """
extern "C" int cuInit(unsigned flags) { return flags ? 1 : INIT; }
extern "C" int cuDeviceGet(int* device, int ordinal) { return *device = 7, ordinal; }
extern "C" int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device != 7) return 101;
  *value = attribute == 75 ? 12 : attribute == 76 ? 1 : -1;
  return 0;
}
"""
NO_DEVICE = 100


def ask(folder: Path, init: int | None) -> subprocess.CompletedProcess[str]:
    """`gpu_target` in a process that finds this driver, or (None) one that cannot be loaded."""
    library = folder / "libcuda.so.1"
    if init is None:
        library.write_text("not a library")
    else:
        command = [compiler()[0], "-shared", "-fPIC", f"-DINIT={init}", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=DRIVER, text=True, check=True)
    script = "from flashnext.plugins.device_library import gpu_target; print(gpu_target())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


def test_target_is_the_first_gpu_s_capability(tmp_path: Path) -> None:
    assert ask(tmp_path, 0).stdout == "121\n"


@pytest.mark.parametrize(
    ("init", "message"),
    [(NO_DEVICE, "The NVIDIA driver shows no GPU (status 100)"), (None, "No NVIDIA driver is here")],
)
def test_without_a_gpu_one_sentence_says_so(tmp_path: Path, init: int | None, message: str) -> None:
    run = ask(tmp_path, init)
    assert run.returncode == 1
    assert f"PluginError: {message}" in run.stderr
