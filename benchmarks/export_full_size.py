"""Export of checkpoints of the official sizes: time, peak memory and bytes written, by the number of layers.

    python benchmarks/export_full_size.py [--layout bf16] [--layers 12 24 48]

Each checkpoint is sparse (holes instead of weights: an export reads headers only) and lies in a temporary folder. The
command `flashnext export --beside` runs as a process of its own, and onnx.checker then checks every graph from the
folder of the shards, external data included. Prints a table and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flashnext.export.checkpoint.sparse_checkpoint import LAYOUTS, write_sparse_checkpoint
from flashnext.export.errors import message_at_exit
from flashnext.runtime.cli.parser import whole_number
from flashnext.runtime.cli.table import render

CHECK = "import onnx, pathlib; [onnx.checker.check_model(str(f)) for f in sorted(pathlib.Path().glob('*.onnx'))]"


def measure(folder: Path, layout: str, layers: int) -> dict[str, Any]:
    """Export one checkpoint; the figures of it."""
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    write_sparse_checkpoint(checkpoint, layout=layout, layers=layers)
    apparent = sum(f.stat().st_size for f in checkpoint.iterdir())
    command = [sys.executable, "-m", "flashnext.runtime.cli.main", "export", checkpoint, bundle, "--beside"]
    seconds, cpu_seconds, peak = run(command, folder)
    written = sum(f.stat().st_size for f in (*bundle.iterdir(), *checkpoint.glob("*.onnx")))
    check_seconds, _, _ = run([sys.executable, "-c", CHECK], checkpoint)
    return {
        "layers": layers,
        "checkpoint_bytes": apparent,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "peak_bytes": peak,
        "written_bytes": written,
        "check_seconds": round(check_seconds, 1),
    }


def run(command: list[Any], folder: Path) -> tuple[float, float, int]:
    """Run a command; its wall time, processor time and peak resident memory."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed with status {status}.")
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the export of checkpoints of the official sizes.")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="bf16")
    parser.add_argument("--layers", type=whole_number(1, 1024), nargs="+", default=[12, 24, 48])
    options = parser.parse_args()
    figures = []
    for layers in options.layers:
        with message_at_exit(), tempfile.TemporaryDirectory() as folder:
            figures.append(measure(Path(folder), options.layout, layers))
    header = ["layers", "checkpoint GB", "seconds", "processor s", "peak MB", "written MB", "check s"]
    rows = [
        [
            str(f["layers"]),
            f"{f['checkpoint_bytes'] / 1e9:.1f}",
            f"{f['seconds']:.1f}",
            f"{f['cpu_seconds']:.1f}",
            f"{f['peak_bytes'] / 1e6:.0f}",
            f"{f['written_bytes'] / 1e6:.1f}",
            f"{f['check_seconds']:.1f}",
        ]
        for f in figures
    ]
    print(render(header, rows))
    print(json.dumps({"benchmark": "export_full_size", "layout": options.layout, "figures": figures}))


if __name__ == "__main__":
    main()
