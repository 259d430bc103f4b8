"""Compiles every kernel with nvcc for every target; reads ptxas's report and the machine code.

A kernel that spills registers, or that keeps an array in local memory (a stack frame, or LDL and STL instructions),
is a failure: both turn register traffic into memory traffic. The table also says how many registers and how much
static shared memory a kernel takes, and how wide its accesses to global memory are.

    python scripts/check_kernels                                  # all ops, all targets: a table, then one JSON line
    python scripts/check_kernels --op gated_residual --target 90
    python scripts/check_kernels --json                           # everything as JSON instead of the table

Without cuobjdump, `--without-machine-code` checks ptxas's report alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashnext.export.errors import FlashNextError, PluginError
from flashnext.plugins.cuda_tools import find_tool
from flashnext.plugins.host_build import MAX_COMPILERS, SOURCES, kernel_sources
from flashnext.plugins.machine_code import Accesses, disassemble

TARGETS = ("80", "89", "90", "100", "120")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
COLUMNS = ("op", "kernel", "sm", "registers", "shared", "faults", "loads", "stores", "cp.async", "generic")


@dataclass
class Kernel:
    """What the compiler and the machine code say about one kernel for one target."""

    op: str
    name: str
    target: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    accesses: Accesses = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """What is wrong, with its amount; nothing if all is well."""
        local = sum(self.accesses.get("local", {}).values())
        found = {"spilled bytes": self.spill_bytes, "bytes of stack": self.stack_bytes, "local accesses": local}
        return [f"{amount} {what}" for what, amount in found.items() if amount]

    def summary(self) -> dict[str, Any]:
        return {**asdict(self), "faults": self.faults}


def check(source: Path, target: str, machine_code: bool = True) -> list[Kernel]:
    """Compile one source for one target ("90", say).

    Raises:
        PluginError: a tool is not here, or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = [str(find_tool("nvcc")), "-std=c++20", "-O3", f"-arch=sm_{target}", f"-I{SOURCES}"]
        command += ["--resource-usage", "-cubin", str(source), "-o", str(cubin)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise PluginError(f"nvcc failed on {source.parent.name} for sm_{target}:\n{run.stderr}")
        kernels = list(parse_resources(run.stdout + run.stderr, source.parent.name))
        code = disassemble(cubin) if machine_code else {}
    for kernel in kernels if machine_code else []:
        if kernel.name not in code:
            raise PluginError(f"cuobjdump does not list {kernel.name}, which ptxas reports for sm_{target}.")
        kernel.accesses = code[kernel.name]
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
    """One line per kernel and target, Markdown; accesses as instructions x bits, the widest first."""
    names = readable([k.name for k in kernels])
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    for k in kernels:
        faults = ", ".join(k.faults) or "none"
        accesses = (widths(k.accesses, kind) for kind in ("load", "store", "copy", "generic"))
        cells = [k.op, names[k.name], k.target, str(k.registers), str(k.shared_bytes), faults, *accesses]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def widths(accesses: Accesses, kind: str) -> str:
    """The accesses of one kind, as in "142 x 128, 24 x 64"."""
    found = sorted(accesses.get(kind, {}).items(), reverse=True)
    return ", ".join(f"{count} x {width}" for width, count in found)


def check_all(sources: Sequence[Path], targets: Sequence[str], machine_code: bool) -> list[Kernel]:
    """Every source for every target, in this order, several compilers at a time."""
    jobs = [(source, target) for source in sources for target in targets]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
        return [k for found in pool.map(lambda job: check(job[0], job[1], machine_code), jobs) for k in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; 0: all is well, 1: a kernel has a fault, 2: it cannot be checked here."""
    ops = sorted(source.parent.name for source in kernel_sources())
    parser = argparse.ArgumentParser(description="Compile every kernel with nvcc and fail on spills or local memory.")
    parser.add_argument("--op", action="append", choices=ops, help="only this op (may be repeated)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this architecture (may be repeated)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, without the table")
    parser.add_argument("--without-machine-code", action="store_true", help="look at ptxas's report alone")
    options = parser.parse_args(arguments)
    sources = [s for s in kernel_sources() if not options.op or s.parent.name in options.op]
    try:
        kernels = check_all(sources, options.target or TARGETS, not options.without_machine_code)
    except FlashNextError as error:
        print(f"check_kernels: {error}", file=sys.stderr)
        return 2
    faulty = [k.summary() for k in kernels if k.faults]
    if options.json:
        print(json.dumps({"kernels": [k.summary() for k in kernels], "faulty": len(faulty)}, indent=1))
    else:
        print(table(kernels))
        print(json.dumps({"kernels": len(kernels), "faulty": faulty}))
    return 1 if faulty or not kernels else 0
