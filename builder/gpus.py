"""The GPU at hand, as nvidia-smi tells: no CUDA package is needed to know whether there is one."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

FIELDS = "name,compute_cap,memory.free"
PATIENCE_SECONDS = 30


@dataclass(frozen=True)
class Gpu:
    """Name, compute capability (90 is 9.0) and free memory in bytes."""

    name: str
    capability: int
    free_bytes: int


def find_gpu() -> Gpu | None:
    """The first GPU, or None where none answers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_gpu(run.stdout) if run.returncode == 0 else None


def parse_gpu(text: str) -> Gpu | None:
    """The first GPU of nvidia-smi's table; None where it cannot be read."""
    words = [word.strip() for word in (text.splitlines() or [""])[0].rsplit(",", 2)]
    try:
        name, capability, free = words
        return Gpu(name, int(capability.replace(".", "")), int(free) << 20)
    except ValueError:
        return None
