"""Opens the engines of a bundle: finds the folder, checks that it fits, loads weights and plans.

Everything that can be known before memory is taken is checked before: that the folder was built from this bundle, by
this TensorRT, for this GPU, with a plugin library that is here; that plans are as they were; that weights, states and
plans fit the device's memory. Each mismatch is a sentence with the remedy.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flashnext.builder.engine_manifest import ENGINES_FOLDER, FILE_NAME, EngineGraph, EngineManifest, read_plan
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError, PluginError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.engine_set import EngineOptions, EngineSet, StepLimits
from flashnext.runtime.engines.tensorrt import states, weight_stream
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.device import Device
from flashnext.runtime.engines.tensorrt.engine import TensorRTEngine, output_bytes
from flashnext.runtime.engines.tensorrt.inspection import check_states_stay
from flashnext.runtime.engines.tensorrt.plan import Library, Plan
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.engines.tensorrt.shapes import limits, most_bytes, plan_form
from flashnext.runtime.states import bytes_per_slot, state_specs

RESIDENT = {"head": None, "body": ("hidden", "hidden_token_scale")}
"""Outputs that stay on the device, by graph (None: all); the draft layer's are `hidden_out`."""
DRAFT_RESIDENT = ("hidden_out", "hidden_out_token_scale")


@dataclass(frozen=True)
class Opened:
    """An engine folder whose plans have been loaded."""

    folder: Path
    built: EngineManifest
    session: Session
    plans: Mapping[str, Mapping[str, Plan]]
    """Of each graph, by file."""


def open_bundle(
    kind: str,
    bundle: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    options: EngineOptions,
    resident: bool = True,
) -> EngineSet:
    """Every graph of a bundle, with weights and states in the device's memory.

    Args:
        resident: leave on the device what only other graphs take; else every output is a numpy array.

    Raises:
        EngineError: there is no engine that fits, or the device has too little memory.
        CheckpointError: a weight that is missing or cannot be read.
    """
    opened = _open(kind, bundle, manifest, options)
    session = opened.session
    try:
        in_place = all(graph.in_place for graph in opened.built.graphs.values())
        kept = states.allocate(session, state_specs(manifest), in_place)
        engines = {
            name: make_engine(opened, manifest, name, resident_outputs(name, spec) if resident else frozenset())
            for name, spec in manifest.graphs.items()
        }
        session.settle()
        specs = [*manifest.weights, *weight_stream.freed(opened.built, manifest, checkpoint)]
        weights = weight_stream.load(session, specs, checkpoint, options.expert_memory == "host")
        for engine in engines.values():
            engine.bind({**weights, **kept})
    except BaseException:
        session.close()
        raise

    def close() -> None:
        session.drain()  # copies may still read what the engines release
        for engine in engines.values():
            engine.close()
        session.close()

    return EngineSet(engines, states.DeviceStates(kept), step_limits(manifest, opened.built), close)


def open_graph(kind: str, graph: str, bundle: Path, manifest: Manifest) -> TensorRTEngine:
    """One graph, whose weights and states are still to be bound; all its outputs are numpy arrays."""
    opened = _open(kind, bundle, manifest, EngineOptions(), only=graph)
    engine = make_engine(opened, manifest, graph, frozenset())
    opened.session.settle()
    weakref.finalize(engine, opened.session.close)
    return engine


def make_engine(opened: Opened, manifest: Manifest, graph: str, resident: frozenset[str]) -> TensorRTEngine:
    """An engine of one of the graphs."""
    plans = opened.plans[graph]
    built = opened.built.graphs[graph]
    return TensorRTEngine(manifest.graphs[graph], built, plans, opened.session, manifest.window, resident)


def resident_outputs(graph: str, spec: GraphSpec) -> frozenset[str]:
    """The outputs of a graph that only other graphs take."""
    names = RESIDENT.get(graph, DRAFT_RESIDENT)
    return frozenset(t.name for t in spec.outputs if t.role != "state" and (names is None or t.name in names))


def step_limits(manifest: Manifest, built: EngineManifest) -> StepLimits:
    """The largest steps that every graph takes, of one prompt and of several sequences."""
    found = [
        (profile.name, limits(manifest.graphs[name], profile))
        for name, graph in built.graphs.items()
        for profile in graph.profiles
    ]
    decode = [sizes for name, sizes in found if name == "decode"]
    prefill = [sizes for name, sizes in found if name == "prefill"] or decode
    return StepLimits(
        sequences=min(sizes["B"][1] for sizes in decode),
        prompts=min(sizes["B"][1] for sizes in prefill),
        tokens=min(sizes["S"][1] for sizes in prefill),
        logit_rows=min(sizes["N"][1] for sizes in prefill if "N" in sizes),
    )


# --- finding and checking ---------------------------------------------------------------------------------------------


def _open(kind: str, bundle: Path, manifest: Manifest, options: EngineOptions, only: str = "") -> Opened:
    """Load the plans of all graphs, or of one, once everything else is known to fit."""
    library, device = Library.open(kind), new_device()
    try:
        folder, built = find_engine(kind, bundle, device.capability, options.engine_path)
        check_fits(folder, built, kind, bundle, manifest, library, device)
        graphs = [name for name in built.graphs if only in ("", name)]
        in_host = options.expert_memory == "host"
        _check_memory(device, folder, manifest, {g: built.graphs[g] for g in graphs}, in_host)
        if built.plugins:
            library.load_plugins(find_plugins(folder, built.plugins.sha256, device.capability, options.plugins))
        plans = {name: _load(library, folder, built.graphs[name], manifest.graphs[name]) for name in graphs}
        return Opened(folder, built, Session(device, library), plans)
    except BaseException:
        device.close()
        raise


def new_device() -> Device:
    """The GPU that engines run on."""
    return CudaDevice()


def find_engine(
    kind: str, bundle: Path, capability: int, engine_path: str | Path | None = None
) -> tuple[Path, EngineManifest]:
    """The engine folder for a GPU, and what it says of itself.

    Raises:
        EngineError: there is none.
    """
    if engine_path is not None:
        return Path(engine_path), EngineManifest.read(engine_path)
    folders = sorted(path.parent for path in (bundle / ENGINES_FOLDER).glob(f"{kind}-*/{FILE_NAME}"))
    if not folders:
        raise EngineError(
            f"There is no {kind} engine of {bundle}. Build one with: flashnext build {bundle} --engine {kind}"
        )
    found = [(folder, EngineManifest.read(folder)) for folder in folders]
    fitting = (pair for pair in found if capability in pair[1].capabilities)
    return next(fitting, found[0])  # the first one's sentence says what it was built for


def check_fits(
    folder: Path,
    built: EngineManifest,
    kind: str,
    bundle: Path,
    manifest: Manifest,
    library: Library,
    device: Device,
) -> None:
    """Raise an EngineError unless the engine in `folder` can be used for this bundle, here."""
    again = f"Build it again: flashnext build {bundle} --engine {kind}"
    if built.kind != kind:
        raise EngineError(f"{folder} holds a {built.kind} engine, not one of {kind}: choose --engine {built.kind}.")
    built.check_bundle(bundle, folder)
    if built.checkpoint != manifest.checkpoint.identity:
        raise EngineError(f"The engine at {folder} was built from another checkpoint than {bundle}'s. {again}")
    built.check_version(library.version, folder)
    built.check_capability(device.capability, folder)
    if missing := manifest.graphs.keys() - built.graphs.keys():
        raise EngineError(f"The engine at {folder} lacks the graph {min(missing)}. {again}")


def find_plugins(folder: Path, sha256: str, capability: int, named: str | Path | None = None) -> Path:
    """The plugin library that an engine was built with: the one that is named, or that of this installation.

    Raises:
        EngineError: there is none, or another one.
    """
    from flashnext.plugins.tensorrt import library

    try:
        found = library.check(named) if named else library.find(str(capability))
    except PluginError as missing:
        raise EngineError(
            f"The engine at {folder} needs the plugin library that it was built with. {missing}"
        ) from None
    if found.sha256 != sha256:
        raise EngineError(
            f"The engine at {folder} was built with another plugin library (SHA-256 {sha256:.12}…) than {found.path} "
            f"({found.sha256:.12}…). Name its own with --plugins (or ${library.VARIABLE}), or build the engine again."
        )
    return found.path


def _load(library: Library, folder: Path, graph: EngineGraph, spec: GraphSpec) -> dict[str, Plan]:
    """A graph's plans by file, each checked against the bundle."""
    plans = {}
    for plan in graph.plans:
        plans[plan.file] = library.load(read_plan(folder, plan), str(folder / plan.file))
        if fault := next(_differences(plans[plan.file], spec, graph), ""):
            raise EngineError(f"{folder / plan.file} is not a plan of {spec.file}: {fault}. Build the engine again.")
        profiles = [p.index for p in graph.profiles if p.plan == plan.file]
        if profiles and max(profiles) >= plans[plan.file].profiles:
            raise EngineError(f"{folder / plan.file} has no profile {max(profiles)}. Build the engine again.")
        if graph.in_place:
            check_states_stay(plans[plan.file], graph.states, folder / plan.file)
    return plans


def _differences(plan: Plan, spec: GraphSpec, graph: EngineGraph) -> Iterator[str]:
    """What a plan's inputs and outputs have otherwise than the bundle's graph (other capacity, other slots, …)."""
    wanted = {t.name: (True, *plan_form(t, graph.codes)) for t in spec.inputs}
    wanted |= {t.name: (False, *plan_form(t, graph.codes)) for t in spec.outputs}
    found = {name: tensor for name, tensor in plan.tensors().items() if name in wanted or name not in graph.weights}
    yield from (f"it lacks {name}" for name in wanted if name not in found)
    for name, (is_input, dtype, shape) in found.items():
        if name not in wanted:
            yield f"it has {name}, which the graph has not"
            continue
        sizes = tuple(-1 if isinstance(d, str) else d for d in wanted[name][2])
        # A plan may have a fixed size where the bundle's graph has a name: one sequence in prefill, for example.
        same = len(shape) == len(sizes) and all(a == b or b == -1 for a, b in zip(shape, sizes, strict=True))
        if (is_input, dtype) != wanted[name][:2] or not same:
            yield f"its {name} is {dtype} {list(shape)}, the graph's {wanted[name][1]} {list(sizes)}"


def _check_memory(
    device: Device, folder: Path, manifest: Manifest, graphs: Mapping[str, EngineGraph], experts_in_host: bool
) -> None:
    """Raise an EngineError if weights, states, plans and buffers together cannot fit.

    A plan's weights are about as large as its file; scratch memory is known once plans are loaded (`Session.settle`).
    """
    weights = {w.name: math.prod(w.shape) * numpy_dtype(w.dtype).itemsize for w in manifest.weights}
    experts = sum(weights[w.name] for w in manifest.weights if weight_stream.is_expert(w))
    in_place = all(graph.in_place for graph in graphs.values())
    state_bytes = bytes_per_slot(manifest) * (manifest.slots + 1)
    buffers = sum(_edge_bytes(manifest.graphs[name], graph) for name, graph in graphs.items())
    parts = {
        "weights": sum(weights.values()) - (experts if experts_in_host else 0),
        "states": state_bytes * (1 if in_place else 2),
        "plans": sum(plan.bytes for graph in graphs.values() for plan in graph.plans),
        "inputs and outputs": buffers,
    }
    needed, free = sum(parts.values()), device.free_bytes()
    if needed > free:
        shares = ", ".join(f"{what} {nbytes / 1e9:.2f}" for what, nbytes in parts.items())
        hint = "" if experts_in_host or not experts else " Or keep the experts in host memory: --expert-memory host."
        raise EngineError(
            f"The engine at {folder} needs {needed / 1e9:.2f} GB of device memory ({shares}), and {free / 1e9:.2f} GB "
            f"of the {device.name} are free. Export the bundle with fewer --slots or less --capacity.{hint}"
        )


def _edge_bytes(spec: GraphSpec, graph: EngineGraph) -> int:
    """What a graph's inputs and outputs of a step take on the device."""
    inputs = sum(most_bytes(t, spec, graph) for t in spec.inputs if t.role not in ("weight", "state"))
    return inputs + sum(output_bytes(t, spec, graph) for t in spec.outputs if t.role != "state")
