"""Reads cuobjdump's listing of machine code (SASS): how wide a kernel's accesses to memory are, and local ones.

ptxas's report names spills and stack frames; the listing shows what is left after all optimisation: every load and
store instruction with its width. An instruction counts once, however often it runs.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from flashnext.export.errors import PluginError
from flashnext.plugins.cuda_tools import find_tool

FUNCTION = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", re.MULTILINE)
KINDS = {
    "LDG": "load",
    "STG": "store",
    "LDGSTS": "copy",
    "LD": "generic",
    "ST": "generic",
    "LDL": "local",
    "STL": "local",
}
"""Accesses to global memory (`copy`: cp.async), to local memory, or to what the compiler does not know (`generic`)."""
WIDTHS = {"U8": 8, "S8": 8, "8": 8, "U16": 16, "S16": 16, "16": 16, "64": 64, "128": 128, "256": 256}
DEFAULT_WIDTH = 32

Accesses = Mapping[str, Mapping[int, int]]
"""Kind of access to {width in bits: instructions}."""


def disassemble(cubin: Path) -> dict[str, Accesses]:
    """The accesses of every function in a cubin, by its mangled name.

    Raises:
        PluginError: cuobjdump is not here, or fails.
    """
    command = [str(find_tool("cuobjdump")), "-sass", str(cubin)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise PluginError(f"cuobjdump failed on {cubin.name}: {(run.stderr or run.stdout).strip()}")
    return read_listing(run.stdout)


def read_listing(text: str) -> dict[str, Accesses]:
    """The accesses of every function in cuobjdump's listing."""
    parts = FUNCTION.split(text)[1:]
    return {name: count_accesses(code) for name, code in zip(parts[::2], parts[1::2], strict=True)}


def count_accesses(code: str) -> Accesses:
    """The accesses of one function's listing."""
    found: dict[str, Counter[int]] = {}
    for mnemonic, modifiers in INSTRUCTION.findall(code):
        if mnemonic in KINDS:
            widths = [WIDTHS[m] for m in modifiers.split(".") if m in WIDTHS]
            found.setdefault(KINDS[mnemonic], Counter())[widths[0] if widths else DEFAULT_WIDTH] += 1
    return {kind: dict(counts) for kind, counts in found.items()}
