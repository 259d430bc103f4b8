"""Compiles every kernel with nvcc for every target and reads ptxas's report. `scripts/check_kernels` runs this.

A kernel that spills registers, or that keeps an array in local memory (a stack frame), is a failure: both turn
register traffic into memory traffic. Where cuobjdump is installed, the machine code is looked at too: local loads and
stores that ptxas did not report, and how wide the loads from global memory are.

    python scripts/check_kernels                                  # all ops, all targets
    python scripts/check_kernels --op gated_residual --target 90
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flashnext.export.errors import FlashNextError, PluginError
from flashnext.plugins.host_build import SOURCES, kernel_sources

TARGETS = ("80", "89", "90", "100", "120")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
FUNCTION = re.compile(r"Function : (\w+)")
GLOBAL_LOAD = re.compile(r"\bLDG\S*?\.(128|64|U?16|U?8|U8|S8|S16)?\b|\bLDG\S*")
LOCAL = re.compile(r"\b(LDL|STL)\b")


@dataclass
class Kernel:
    """What the compiler reports about one kernel for one target."""

    op: str
    name: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    local_accesses: int = 0
    loads: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        found = {"spills": self.spill_bytes, "local memory": self.stack_bytes, "local accesses": self.local_accesses}
        return [f"{what} ({amount})" for what, amount in found.items() if amount]


def check(source: Path, target: str) -> list[Kernel]:
    """Compile one source for one target."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        raise PluginError("nvcc is not on the PATH. Install the CUDA toolkit 13, or add its bin folder to the PATH.")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [nvcc, "-std=c++20", "-O3", f"-arch=sm_{target}", f"-I{SOURCES}", "--resource-usage", "-cubin"]
        run = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True, check=False)
        if run.returncode:
            raise PluginError(f"nvcc failed on {source.parent.name} for sm_{target}:\n{run.stderr}")
        kernels = list(parse_resources(run.stdout + run.stderr, source.parent.name))
        if shutil.which("cuobjdump"):
            dump = subprocess.run(["cuobjdump", "-sass", str(cubin)], capture_output=True, text=True, check=True)
            add_machine_code(kernels, dump.stdout)
    return kernels


def parse_resources(text: str, op: str) -> Iterator[Kernel]:
    """The kernels in ptxas's report."""
    parts = ENTRY.split(text)[1:]
    for name, target, report in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        frame, registers, shared = FRAME.search(report), REGISTERS.search(report), SHARED.search(report)
        if not frame or not registers:
            raise PluginError(f"ptxas reports {name} in a form that plugins/device_check.py does not know:\n{report}")
        stack, stores, loads = (int(n) for n in frame.groups())
        shared_bytes = int(shared[1]) if shared else 0
        yield Kernel(op, name, target, int(registers[1]), shared_bytes, stack, stores + loads)


def add_machine_code(kernels: Sequence[Kernel], dump: str) -> None:
    """Widths of global loads, and accesses to local memory, from cuobjdump's listing."""
    parts = FUNCTION.split(dump)[1:]
    code = dict(zip(parts[::2], parts[1::2], strict=True))
    for kernel in kernels:
        listing = code.get(kernel.name, "")
        kernel.local_accesses = len(LOCAL.findall(listing))
        kernel.loads = dict(Counter(match[1] or "32" for match in GLOBAL_LOAD.finditer(listing)))


def readable(names: Sequence[str]) -> dict[str, str]:
    """Demangled kernel names without namespaces and parameters."""
    if not shutil.which("c++filt"):
        return {name: name for name in names}
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    short = (
        re.sub(r"\w+::|\((?:\w|::)*unnamed>::|\(anonymous namespace\)::|^void ", "", n) for n in run.stdout.split("\n")
    )
    return {name: re.sub(r"\([^()]*\)$", "", s) for name, s in zip(names, short, strict=False)}


def table(kernels: Sequence[Kernel]) -> str:
    """One line per kernel, Markdown."""
    names = readable([k.name for k in kernels])
    lines = [
        "| op | kernel | sm | registers | shared | faults | global loads |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for k in kernels:
        loads = ", ".join(f"{count} x {width} bit" for width, count in sorted(k.loads.items()))
        faults = ", ".join(k.faults) or "none"
        lines.append(
            f"| {k.op} | {names[k.name]} | {k.target} | {k.registers} | {k.shared_bytes} | {faults} | {loads} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel with nvcc and fail on spills or local memory.")
    parser.add_argument("--op", action="append", help="only this op (may be repeated)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this architecture (may be repeated)")
    options = parser.parse_args(arguments)
    sources = [s for s in kernel_sources() if not options.op or s.parent.name in options.op]
    try:
        kernels = [k for s in sources for target in options.target or TARGETS for k in check(s, target)]
    except FlashNextError as error:
        print(f"check_kernels: {error}", file=sys.stderr)
        return 2
    print(table(kernels))
    faulty = [k for k in kernels if k.faults]
    print(json.dumps({"kernels": len(kernels), "faulty": [asdict(k) for k in faulty]}))
    return 1 if faulty or not kernels else 0
