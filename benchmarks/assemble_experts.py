"""Rate of assembling per-expert tensors, against `cat FILES > /dev/null` on the same files.

    python benchmarks/assemble_experts.py [--gigabytes 4] [--rounds 3] [--folder FOLDER]

Makes a checkpoint of per-expert tensors of the official sizes with random bytes in a temporary folder (removed at the
end). Each round reads it with `cat` and assembles it in a process of its own, both with the files dropped from the
page cache, in turn; then both again from the cache. The process touches and frees as much memory beforehand: on a
virtual machine the first touch of memory can cost seconds that have nothing to do with reading. The ratio is the
median over the rounds, each of which compares its own two times. Peak memory is the process's, less what it used
before; what is kept are the weights. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES, read_header
from flashnext.export.checkpoint.safetensors_writer import PlannedTensor, write_safetensors
from flashnext.runtime.cli.parser import number_from, whole_number
from flashnext.runtime.cli.table import render

HIDDEN, WIDTH = 2560, 640
TENSORS = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 2
FILES = 4

CHILD = """
import json, resource, sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES, read_header
from flashnext.export.graphs.manifest import WeightSpec
from flashnext.runtime import weights

folder, experts, width, hidden = Path(sys.argv[1]), *map(int, sys.argv[2:])
tensors = {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in read_header(f).items()}
at = "experts.{e}"
specs = (
    WeightSpec("gate_up", "bfloat16", (experts, 2, width, hidden), (at + ".gate_proj", at + ".up_proj")),
    WeightSpec("down", "bfloat16", (experts, hidden, width), (at + ".down_proj",)),
)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
fresh = np.empty(sum(t.length for t in tensors.values()), np.uint8)
fresh[::4096] = 1
del fresh
start = time.perf_counter()
made = weights.load_weights(SimpleNamespace(weights=specs), SimpleNamespace(tensors=tensors))
seconds = time.perf_counter() - start
kept = sum(w.nbytes for w in made.values())
print(json.dumps({"seconds": seconds, "kept": kept, "beyond": peak() - before - kept}))
"""


def make_files(folder: Path, experts: int) -> None:
    """Files of per-expert tensors, as a converter writes them: expert after expert."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, HIDDEN * WIDTH, np.uint16).view(NUMPY_DTYPES["BF16"])
    per_file = -(-experts // FILES)
    for number, first in enumerate(range(0, experts, per_file)):
        names = [f"experts.{e}.{t}" for e in range(first, min(first + per_file, experts)) for t in TENSORS]
        plan = [PlannedTensor(name, "BF16", TENSORS[name.rsplit(".", 1)[1]]) for name in names]
        shapes = {t.name: t.shape for t in plan}
        path = folder / f"model-{number + 1:05d}.safetensors"
        write_safetensors(path, plan, lambda name, shapes=shapes: noise.reshape(shapes[name]))
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat(folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run("cat ./*.safetensors >/dev/null", shell=True, check=True, cwd=folder)
    return time.perf_counter() - start


def assemble(folder: Path, experts: int) -> dict[str, Any]:
    command = [sys.executable, "-c", CHILD, folder, *map(str, (experts, WIDTH, HIDDEN))]
    figures: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return figures


def measure(folder: Path, experts: int, rounds: int, cold: bool) -> dict[str, Any]:
    """Median times of both in turn, their ratio, and the worst memory."""
    cats, assemblies = [], []
    for _ in range(rounds):
        for times, run in ((cats, lambda: {"seconds": cat(folder)}), (assemblies, lambda: assemble(folder, experts))):
            if cold:
                forget(folder)
            times.append(run())
    size = sum(t.length for f in folder.iterdir() for t in read_header(f).values())
    seconds = [statistics.median(f["seconds"] for f in figures) for figures in (cats, assemblies)]
    ratios = [c["seconds"] / a["seconds"] for c, a in zip(cats, assemblies, strict=True)]
    return {
        "cache": "cold" if cold else "warm",
        "bytes": size,
        "cat_bytes_per_second": round(size / seconds[0]),
        "assemble_bytes_per_second": round(size / seconds[1]),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "memory_beyond_weights": max(f["beyond"] for f in assemblies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the assembly of per-expert tensors against cat.")
    parser.add_argument("--gigabytes", type=number_from(0.001, 1e4), default=4.0)
    parser.add_argument("--rounds", type=whole_number(1), default=3)
    parser.add_argument("--folder", type=Path, help="where to make the files (default: the system's temporary folder)")
    options = parser.parse_args()
    experts = max(FILES, round(options.gigabytes * 1e9 / EXPERT_BYTES))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 1.5 * experts * EXPERT_BYTES:
            raise SystemExit(f"{folder} has {free:,} bytes free, {1.5 * experts * EXPERT_BYTES:,.0f} are needed.")
        make_files(Path(folder), experts)
        figures = [measure(Path(folder), experts, options.rounds, cold) for cold in (True, False)]
    rows = [
        [
            f["cache"],
            f"{f['cat_bytes_per_second'] / 1e9:.2f}",
            f"{f['assemble_bytes_per_second'] / 1e9:.2f}",
            f"{f['ratio']:.2f}",
            f"{f['memory_beyond_weights'] / 1e6:.0f}",
        ]
        for f in figures
    ]
    print(render(["page cache", "cat GB/s", "assemble GB/s", "ratio", "MB beyond the weights"], rows))
    print(json.dumps({"benchmark": "assemble_experts", "experts": experts, "figures": figures}))


if __name__ == "__main__":
    main()
