"""Builds and runs harness/: the program that plays TensorRT's part for a plugin, under AddressSanitizer and UBSan.

What a case holds is in harness/case_file.h; plugin_cases.py makes cases.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from plugin_cases import PluginCase, Tensor

from flashnext.plugins import host_build
from flashnext.plugins.replay import ENVIRONMENT
from flashnext.plugins.tensorrt.headers import Headers
from flashnext.plugins.tensorrt.library import host_plugin_jobs

FOLDER = Path(__file__).with_name("harness")
WRAPPED = ("flashnext_launch", "flashnext_message", "calloc")
"""What the harness can make fail."""


def build(headers: Headers, kind: str = "address") -> Path:
    """The program, with plugins and kernels in it."""
    flags = [*host_build.COMMON, *host_build.BUILDS[kind], f"-I{host_build.SOURCES / 'tensorrt/host'}"]
    flags += ["-isystem", str(headers.folder), f"-DFLASHNEXT_HEADERS={headers.version}"]
    jobs = [*host_build.kernel_jobs(kind), *host_plugin_jobs(headers, kind)]
    jobs += [(source, flags) for source in sorted(FOLDER.glob("*.cpp"))]
    return host_build.build_from(
        jobs, kind, shared=False, name="harness", link=[f"-Wl,--wrap={name}" for name in WRAPPED]
    )


def run(program: Path, mode: str, case: PluginCase, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """One run of the program; what a sanitizer finds is in its standard error, and makes it fail."""
    file = folder / "case"
    file.write_bytes(case_bytes(case))
    return subprocess.run(
        [program, mode, file, *more], capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT}
    )


# --- the file -----------------------------------------------------------------------------------------


def case_bytes(case: PluginCase) -> bytes:
    """The case as case_file.h reads it."""
    parts = [_text(case.op.encode()), _number(len(case.fields))]
    for name, kind, length, data in case.fields:
        parts += [_text(name.encode()), _number(kind), _number(length), _text(data)]
    parts += [_numbers(case.aliases), _number(len(case.least))]
    for least, most in zip(case.least, case.most, strict=True):
        parts += [_numbers(least), _numbers(most)]
    parts += [_number(case.in_place), _number(len(case.steps))]
    for step in case.steps:
        parts += [_tensor(t) for t in (*step.inputs, *step.outputs)]
    return b"".join(parts)


def _number(value: int) -> bytes:
    return struct.pack("q", value)


def _numbers(values: Sequence[int]) -> bytes:
    return struct.pack(f"{len(values) + 1}q", len(values), *values)


def _text(value: bytes) -> bytes:
    return _number(len(value)) + value


def _tensor(tensor: Tensor) -> bytes:
    return _number(tensor.kind) + _numbers(tensor.shape) + _number(tensor.size) + _text(tensor.data)
