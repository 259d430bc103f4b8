"""What a build will take, told before it begins: host memory, disk, and the least that the device must hold.

Host memory was measured (docs/tensorrt.md, "Building engines"): a process that builds starts at about 220 MB; each
byte of weights that goes into a plan takes two to three while it is read, folded and written; and a graph takes some
by its nodes. The figures here are rounded up from those. Device memory is a lower bound: what a step binds.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec

BASE_BYTES = 400 << 20
BYTES_OF_A_WEIGHT_BYTE = 3.0
BYTES_OF_A_NODE = 24 << 20
"""For each custom node, whose plain operators become kernels."""
PLAN_BYTES_OF_A_NODE = 3 << 20
ITEM_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "uint8": 1, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes that one plan takes: of host memory while it is built, on the disk, and bound on the device at least."""

    host: int
    disk: int
    device: int


def estimate(spec: GraphSpec, weights: int, custom_nodes: int, largest: Mapping[str, int]) -> Estimate:
    """Of a plan of this graph, which holds `weights` bytes, for steps up to the sizes `largest` of B, S and N."""
    bound = sum(_bytes(t, largest) for t in (*spec.inputs, *spec.outputs) if t.name not in spec.states.values())
    return Estimate(
        host=BASE_BYTES + int(BYTES_OF_A_WEIGHT_BYTE * weights) + BYTES_OF_A_NODE * custom_nodes,
        disk=weights + PLAN_BYTES_OF_A_NODE * custom_nodes,
        device=weights + bound,
    )


def _bytes(tensor: TensorSpec, sizes: Mapping[str, int]) -> int:
    count = ITEM_BYTES[tensor.dtype]
    for d in tensor.shape:
        count *= d if isinstance(d, int) else sizes[d]
    return count


def with_gathered(found: Estimate, manifest: Manifest, largest: Mapping[str, int]) -> Estimate:
    """With the float32 weights of the chosen experts, which a decode step of plain operators gathers layer by layer."""
    c = manifest.config
    each = 3 * c.moe_intermediate_size * c.hidden_size * ITEM_BYTES["float32"]
    gathered = largest["B"] * largest["S"] * c.num_experts_per_tok * each
    return dataclasses.replace(found, device=found.device + gathered)


def check_host(what: str, needed: int) -> None:
    """Raise a BuildError where the host has less memory free than a build is estimated to need."""
    free = free_host_bytes()
    if free is not None and needed > free:
        raise BuildError(
            f"Building {what} takes about {_gb(needed)} of memory, and {_gb(free)} are free. Build on a machine with "
            "more, end what else uses it, or keep the weights out of the plans with --weights-as-inputs."
        )


def check_disk(folder: Path, needed: int) -> None:
    """Raise a BuildError where the disk has less room than the plans are estimated to take."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BuildError(
            f"The plans take about {_gb(needed)}, and {folder} has {_gb(free)} free. Name another folder with --out."
        )


def check_device(gpu: str, needed: int, free: int) -> None:
    """Raise a BuildError where the GPU has less memory free than a step binds."""
    if needed > free:
        raise BuildError(
            f"A step binds at least {_gb(needed)} on the GPU, and {gpu} has {_gb(free)} free. Build with a smaller "
            "--max-batch or --prefill-chunk, or export the bundle with fewer --slots or less --capacity "
            "(flashnext info CHECKPOINT --gpu-memory says what fits)."
        )


def free_host_bytes() -> int | None:
    """Memory that processes may still take: the system's, or what the process's control group leaves; None: unknown."""
    figures = [_available(), _group_limit()]
    return min((f for f in figures if f is not None), default=None)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _group_limit(folder: str = "/sys/fs/cgroup") -> int | None:
    try:
        limit, used = (Path(folder, f"memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # "max": no limit
        return None


def _gb(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
