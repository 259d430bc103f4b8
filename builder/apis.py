"""TensorRT and TensorRT for RTX as one interface: this module is where they differ, build_plan.py what they share.

| | TensorRT | TensorRT for RTX |
| --- | --- | --- |
| package | `tensorrt` | `tensorrt_rtx` |
| custom nodes | plugins, from a library that its registry loads | none: plain operators |
| builds for | the GPU at hand, by timing kernels on it | compute capabilities that are named, with or without a GPU |
| plans of a graph | one, with a profile for each kind of step | one for each kind of step |
| states | read and written in place by plugins | read from one buffer, written to another |

Nothing here imports either package before it is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnext.builder.job import PlanJob
from flashnext.export.errors import BuildError

RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)
"""What TensorRT for RTX knows as targets."""
TIMING_CACHE_LIMIT = 1 << 30


@dataclass(frozen=True)
class Api:
    """One of the two: its module, and the calls that only it has."""

    kind: str
    name: str
    trt: Any

    @property
    def version(self) -> str:
        return str(self.trt.__version__)

    @property
    def one_plan(self) -> bool:
        """Whether a graph's kinds of steps are profiles of one plan."""
        return one_plan(self.kind)

    @property
    def tells_progress(self) -> bool:
        """Whether builds are watched. Callbacks change the order of allocations, and with it a plan's bytes; builds of
        TensorRT for RTX take seconds and are reproducible, those of TensorRT take minutes and are not."""
        return self.kind == "tensorrt"

    def prepare(self, builder: Any, job: PlanJob) -> None:
        """What has to be done before a graph is parsed."""
        if self.kind == "tensorrt" and job.plugins:
            load_plugins(builder.get_plugin_registry(), job.plugins)

    def configure(self, config: Any, job: PlanJob) -> None:
        """Settings of one build."""
        trt = self.trt
        config.clear_flag(trt.BuilderFlag.TF32)  # on by default, and three digits of a float32 product
        if job.workspace:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace)
        if self.kind == "tensorrt-rtx":
            config.num_compute_capabilities = len(job.capabilities)
            for index, capability in enumerate(job.capabilities):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
            return
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # how the runtime sees that no state is copied
        if job.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        if job.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if job.timing_cache:
            config.set_timing_cache(config.create_timing_cache(read_timing_cache(job.timing_cache)), False)

    def finish(self, config: Any, job: PlanJob) -> None:
        """What has to be done once a plan is there."""
        if self.kind == "tensorrt" and job.timing_cache:
            write_timing_cache(Path(job.timing_cache), bytes(config.get_timing_cache().serialize()))


NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT for RTX"}
MODULES = {
    "tensorrt": ("tensorrt", "tensorrt_bindings"),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
"""The full packages, and the bindings' wheels."""
OLDEST = {"tensorrt": (11, 0), "tensorrt-rtx": (1, 5)}


def one_plan(kind: str) -> bool:
    """Whether a graph's kinds of steps are profiles of one plan; else each has a plan of its own."""
    return kind == "tensorrt"


def open_api(kind: str) -> Api:
    """TensorRT ("tensorrt") or TensorRT for RTX ("tensorrt-rtx"), imported.

    Raises:
        BuildError: it is not installed, or older than what is called here.
    """
    name, causes = NAMES[kind], []
    for module in MODULES[kind]:
        try:
            trt = importlib.import_module(module)
        except (ImportError, OSError) as cause:
            causes.append(f"{module}: {cause}")
            continue
        api = Api(kind, name, trt)
        _check_version(api)
        return api
    raise BuildError(
        f"{name} is not installed ({'; '.join(causes)[:300]}). Install it with: pip install 'flashnext-trt[{kind}]'"
    )


def _check_version(api: Api) -> None:
    found = tuple(int(part) for part in api.version.split(".")[:2])
    if found < OLDEST[api.kind]:
        wanted = ".".join(map(str, OLDEST[api.kind]))
        raise BuildError(f"{api.name} {api.version} is installed; engines are built with {wanted} or newer. Update it.")


def load_plugins(registry: Any, library: str) -> None:
    """Make a plugin library's creators known to TensorRT.

    Raises:
        BuildError: TensorRT does not take the library.
    """
    if registry.load_library(library) is None:
        raise BuildError(
            f"TensorRT cannot load the plugin library {library}. See what is wrong with: flashnext plugins check"
        )


def read_timing_cache(path: str) -> bytes:
    """The timings of earlier builds; nothing where there is no such file yet.

    Raises:
        BuildError: it cannot be read.
    """
    from flashnext.export.files import read_small_file

    if not Path(path).exists():
        return b""
    return read_small_file(Path(path), BuildError, "a timing cache", TIMING_CACHE_LIMIT)


def write_timing_cache(path: Path, content: bytes) -> None:
    """Replace the file, so that a reader finds the old or the new timings."""
    partial = path.with_name(f".{path.name}.part")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
