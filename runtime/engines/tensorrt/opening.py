"""Opens the engines of a bundle: finds the folder, checks that it fits (fitting.py), loads plans and weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashnext.builder.engine_manifest import EngineGraph, EngineManifest, read_plan
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.runtime.engines.engine_set import EngineOptions, EngineSet, StepLimits
from flashnext.runtime.engines.tensorrt import states, weight_stream
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.device import Device
from flashnext.runtime.engines.tensorrt.device_rows import DeviceRows, Most
from flashnext.runtime.engines.tensorrt.engine import TensorRTEngine
from flashnext.runtime.engines.tensorrt.fitting import (
    check_fits,
    check_memory,
    differences,
    find_engine,
    find_plugins,
)
from flashnext.runtime.engines.tensorrt.inspection import check_states_stay
from flashnext.runtime.engines.tensorrt.kernels import Kernels
from flashnext.runtime.engines.tensorrt.plan import Library, Plan
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.engines.tensorrt.shapes import limits
from flashnext.runtime.states import state_specs

if TYPE_CHECKING:
    from flashnext.plugins.tensorrt.library import LibraryInfo

RESIDENT = {"head": None, "body": ("hidden", "hidden_token_scale", "logits")}
"""Outputs that stay on the device, by graph (None: all); the draft layer's are `hidden_out` and its logits."""
DRAFT_RESIDENT = ("hidden_out", "hidden_out_token_scale", "logits")
LOGGER = logging.getLogger("flashnext.tensorrt")


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
        resident: leave on the device what only other graphs take, and logits; else every output is a numpy array.

    Raises:
        EngineError: there is no engine that fits, or the device has too little memory.
        CheckpointError: a weight that is missing or cannot be read.
    """
    opened = _open(kind, bundle, manifest, options)
    session, engines, rows = opened.session, dict[str, TensorRTEngine](), dict[str, DeviceRows]()

    def close() -> None:
        for source in rows.values():
            source.close()
        session.drain()  # copies may still read what the engines release
        for engine in engines.values():
            engine.close()
        session.close()

    try:
        in_place = all(graph.in_place for graph in opened.built.graphs.values())
        kept = states.allocate(session, state_specs(manifest), in_place)
        for name, spec in manifest.graphs.items():
            staying = resident_outputs(name, spec) if resident else frozenset()
            engines[name] = make_engine(opened, manifest, name, staying)
        session.settle()
        if options.ngram_gather == "device":
            rows |= open_rows(opened, manifest, checkpoint, engines["body"])
        specs = [*manifest.weights, *weight_stream.freed(opened.built, manifest, checkpoint)]
        weights = weight_stream.load(session, specs, checkpoint, options.expert_memory == "host")
        for engine in engines.values():
            engine.bind({**weights, **kept})
    except BaseException:
        close()
        raise
    found = step_limits(manifest, opened.built)
    return EngineSet(engines, states.DeviceStates(kept), found, close, row_sources=rows)


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


def open_rows(
    opened: Opened, manifest: Manifest, checkpoint: Checkpoint, body: TensorRTEngine
) -> dict[str, DeviceRows]:
    """What finds the n-gram rows on the device, by the body's input.

    Raises:
        EngineError: the engine has no kernels, or none for such a table.
        RequestError: the tables cannot be pinned.
    """
    if opened.session.kernels is None:
        raise EngineError(
            f'ngram_gather = "device" takes a kernel of the plugin library, and the engine at {opened.folder} was '
            "built without one, or with one of other sources. Build it again, or let the host gather "
            '(ngram_gather = "host").'
        )
    rows: dict[str, DeviceRows] = {}
    found = step_limits(manifest, opened.built)
    tokens = max(found.sequences * manifest.window, found.prompts * found.tokens)
    most = Most(max(found.sequences, found.prompts), tokens)
    with ExitStack() as undo:
        for ngram in manifest.ngrams:
            rows[ngram.input] = DeviceRows.open(opened.session, ngram, checkpoint, manifest.dtype, most, body.consumed)
            undo.callback(rows[ngram.input].close)
        undo.pop_all()
    return rows


def resident_outputs(graph: str, spec: GraphSpec) -> frozenset[str]:
    """The outputs of a graph that other graphs take, or of which the host takes little."""
    names = RESIDENT.get(graph, DRAFT_RESIDENT)
    return frozenset(t.name for t in spec.outputs if t.role != "state" and (names is None or t.name in names))


def step_limits(manifest: Manifest, built: EngineManifest) -> StepLimits:
    """The largest steps that every graph takes, of one prompt and of several sequences."""
    found = [
        (profile.name, limits(manifest.graphs[name], profile))
        for name, graph in built.graphs.items()
        for profile in graph.profiles
        if name in manifest.graphs
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
        graphs = [name for name in manifest.graphs if only in ("", name)]
        in_host = options.expert_memory == "host"
        check_memory(device, folder, manifest, {g: built.graphs[g] for g in graphs}, in_host)
        kernels = None
        if built.plugins:
            plugins = find_plugins(folder, built.plugins.sha256, device.capability, options.plugins)
            library.load_plugins(plugins.path)
            kernels = _own_kernels(device, plugins)
        plans = {name: _load(library, folder, built.graphs[name], manifest.graphs[name]) for name in graphs}
        return Opened(folder, built, Session(device, library, kernels), plans)
    except BaseException:
        device.close()
        raise


def _own_kernels(device: Device, plugins: LibraryInfo) -> Kernels | None:
    """The library's kernels, to be launched by the engine itself. None, with a warning, of a library of other sources:
    its plugins know their own kernels' parameters, the engine does not."""
    if plugins.is_current:
        return Kernels(device, plugins.path)
    LOGGER.warning(
        "%s was built from other sources than this installation's, so whole rows of logits come to the host. Build it "
        "and the engine again: flashnext plugins build, then flashnext build BUNDLE --engine tensorrt.",
        plugins.path,
    )
    return None


def new_device() -> Device:
    """The GPU that engines run on."""
    return CudaDevice()


def _load(library: Library, folder: Path, graph: EngineGraph, spec: GraphSpec) -> dict[str, Plan]:
    """A graph's plans by file, each checked against the bundle."""
    plans = {}
    for plan in graph.plans:
        plans[plan.file] = library.load(read_plan(folder, plan), str(folder / plan.file))
        if fault := next(differences(plans[plan.file], spec, graph), ""):
            raise EngineError(f"{folder / plan.file} is not a plan of {spec.file}: {fault}. Build the engine again.")
        profiles = [p.index for p in graph.profiles if p.plan == plan.file]
        if profiles and max(profiles) >= plans[plan.file].profiles:
            raise EngineError(f"{folder / plan.file} has no profile {max(profiles)}. Build the engine again.")
        if graph.in_place:
            check_states_stay(plans[plan.file], spec.states, folder / plan.file)
    return plans
