"""Host work of the TensorRT engine in a decode step: what Python does before the GPU gets its work, and after.

    python benchmarks/engine_host_time.py BUNDLE [--batch 1] [--steps 5000]

Needs no GPU and no TensorRT: both are played by stand-ins that do nothing (work that is queued is dropped), so what is
left is the engine itself, the n-gram rows and the model runner. Measured in turns: with the kernel that leaves rows of
logits on the device (its host execution is compiled with g++ and loaded, not run), with rows that are copied whole, and
with n-gram rows that the GPU gathers (without CUDA's own time for the launch). Prints all and ends with one JSON line;
a figure is the least of five runs, in microseconds of this process's CPU time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashnext.builder.engine_manifest import (
    EngineGraph,
    EngineManifest,
    Plan,
    PluginLibrary,
    Profile,
    bundle_identity,
)
from flashnext.builder.profiles import ProfileOptions, ranges, step_sizes
from flashnext.export.errors import message_at_exit
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.plugins import host_build
from flashnext.plugins.tensorrt.library import LibraryInfo, source_digest
from flashnext.runtime.cli.parser import whole_number
from flashnext.runtime.engines.engine_set import EngineOptions
from flashnext.runtime.engines.tensorrt import opening, plan
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.model_runner import ModelRunner, StepBatch

VERSION = "0.0"
RUNS = 5
PLUGINS = PluginLibrary("0" * 64, 1, "", "", ("90",))
VARIANTS = {"step_us": (PLUGINS, "host"), "whole_rows_us": (None, "host"), "device_rows_us": (PLUGINS, "device")}
"""What is measured: the engine's plugin library, and who gathers n-gram rows."""


class Idle:
    """Any object of TensorRT's: every call succeeds and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: True


class IdleEngine:
    """A plan whose inputs and outputs are the bundle's."""

    device_memory_size_v2 = 1 << 20
    num_optimization_profiles = 2

    def __init__(self, spec: GraphSpec) -> None:
        self._tensors = [(t, True) for t in spec.inputs] + [(t, False) for t in spec.outputs]
        self.num_io_tensors = len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index][0].name

    def get_tensor_mode(self, name: str) -> bool:
        return next(is_input for t, is_input in self._tensors if t.name == name)

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=next(t.dtype for t, _ in self._tensors if t.name == name))

    def get_tensor_shape(self, name: str) -> list[int]:
        shape = next(t.shape for t, _ in self._tensors if t.name == name)
        return [-1 if isinstance(d, str) else d for d in shape]

    def get_tensor_location(self, name: str) -> int:
        return 0

    def create_execution_context(self, strategy: object) -> Idle:
        return Idle()

    def create_engine_inspector(self) -> Any:
        plugin = {"Name": "all", "LayerType": "Plugin", "Inputs": [{"Name": t.name} for t, _ in self._tensors]}
        return SimpleNamespace(get_engine_information=lambda form: json.dumps({"Layers": [plugin]}))


class IdleDevice(HostDevice):
    """Memory is real, work is dropped."""

    def queue(self, stream: int, work: Callable[[], None]) -> None: ...

    def synchronize_event(self, event: int) -> None: ...


def idle_module(manifest: Manifest) -> Any:
    """What stands for `tensorrt`; a plan's content is the name of its graph."""
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda name: IdleEngine(manifest.graphs[name.decode()]))
    severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2)
    return SimpleNamespace(
        __version__=VERSION,
        ILogger=type("ILogger", (), {"Severity": severity}),
        Runtime=lambda logger: runtime,
        get_plugin_registry=Idle,
        TensorIOMode=SimpleNamespace(INPUT=True),
        TensorLocation=SimpleNamespace(DEVICE=0),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
        LayerInformationFormat=SimpleNamespace(JSON=1),
    )


def write_engine(bundle: Path, manifest: Manifest, folder: Path, plugins: PluginLibrary | None) -> None:
    """An engine folder with plans that name their graphs."""
    folder.mkdir()
    sizes = step_sizes(manifest, ProfileOptions())
    graphs = {}
    for name, spec in manifest.graphs.items():
        content = name.encode()
        (folder / f"{name}.plan").write_bytes(content)
        plans = (Plan(f"{name}.plan", hashlib.sha256(content).hexdigest(), len(content)),)
        steps = enumerate(sizes.items())
        profiles = tuple(Profile(step, f"{name}.plan", i, ranges(spec, found)) for i, (step, found) in steps)
        graphs[name] = EngineGraph(plans, profiles, (), dict(spec.states), in_place=True)
    identity = manifest.checkpoint.identity
    built = EngineManifest("tensorrt", VERSION, (90,), "", bundle_identity(bundle), identity, graphs, plugins)
    built.write(folder)


def measure(runners: Mapping[str, ModelRunner], batch: int, steps: int) -> dict[str, float]:
    """Microseconds of a decode step, by runner."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(RUNS):
        for name, runner in runners.items():
            times[name].append(once(runner, batch, steps // RUNS))
    return {name: min(found) * 1e6 for name, found in times.items()}


def once(runner: ModelRunner, batch: int, steps: int) -> float:
    """Seconds of a decode step."""
    rows = np.arange(batch, dtype=np.int32)
    length, one = np.full(batch, 5, np.int32), np.ones(batch, np.int32)
    context = np.zeros((batch, runner.manifest.config.ngram_size - 1), np.int64)
    step = StepBatch(one[:, None], rows, length, one, one, context, rows)
    start = time.process_time()
    for _ in range(steps):
        runner.step(step)
    return (time.process_time() - start) / steps


def run(bundle: Path, batch: int, steps: int) -> Mapping[str, Any]:
    """Open the bundle in stand-ins and measure."""
    manifest = Manifest.read(bundle)
    library = plan.Library("tensorrt", idle_module(manifest))
    plan.Library.open = lambda kind: library  # type: ignore[method-assign]
    names = {dtype: dtype for dtype in plan.DTYPES.values()}
    plan.DTYPES.update(names)
    opening.new_device = IdleDevice
    kernels = host_build.build("plain", [host_build.SOURCES / op / "kernel.cu" for op in ("candidates", "ngram_rows")])
    info = LibraryInfo(kernels, "", 1, "", "", (), source_digest())
    opening.find_plugins = lambda *_: info
    with tempfile.TemporaryDirectory(prefix="engine_host_time-") as folder:
        runners = {}
        for name, (plugins, gather) in VARIANTS.items():
            write_engine(bundle, manifest, Path(folder) / name, plugins)
            options = EngineOptions(engine_path=Path(folder) / name, ngram_gather=gather)
            table = "pinned" if gather == "device" else "mapped"
            runners[name] = ModelRunner.open(bundle, "tensorrt", options=options, ngram_table=table)
        found = measure(runners, batch, steps)
        for runner in runners.values():
            runner.close()
    states = sum(len(graph.states) for name, graph in manifest.graphs.items() if name in ("head", "body"))
    return {"batch": batch, "states": states, **{name: round(us, 1) for name, us in found.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description="Host work of the TensorRT engine in a decode step.")
    parser.add_argument("bundle", type=Path, help="folder made by `flashnext export`")
    parser.add_argument("--batch", type=whole_number(1), default=1, help="sequences of a step (default: 1)")
    parser.add_argument("--steps", type=whole_number(RUNS), default=5000, help="measured steps (default: 5000)")
    options = parser.parse_args()
    with message_at_exit():
        found = run(options.bundle, options.batch, options.steps)
        print(
            f"decode step of {found['batch']} sequences, {found['states']} states: {found['step_us']} us of host work; "
            f"{found['whole_rows_us']} us with whole rows of logits, {found['device_rows_us']} us with n-gram rows "
            "that the GPU gathers"
        )
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
