"""`flashnext build`: the graphs of a bundle become plans of TensorRT or TensorRT for RTX, and an `engine.json`.

    proposal = propose("bundle", manifest, checkpoint.common_parent, EngineOptions("tensorrt-rtx", (120,)))
    build_engine(proposal)

One plan after the other, each in a process of its own (plan_process.py). The engine's folder appears whole or not at
all. On a machine with a GPU a golden prompt is compared before that: `golden` runs it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path

from flashnext.builder.engine_manifest import (
    PASSED,
    EngineGraph,
    EngineManifest,
    Plan,
    Profile,
    bundle_identity,
)
from flashnext.builder.job import PlanJob
from flashnext.builder.plan_process import BuiltPlan, build_in_process
from flashnext.builder.plugin_graph import PluginGraph, plugin_form
from flashnext.builder.portable_graph import PortableGraph, portable_form
from flashnext.builder.proposal import Proposal, ProposedPlan, check_memory
from flashnext.builder.source_graph import read_graph
from flashnext.export.errors import BuildError
from flashnext.export.graphs.whole_folder import whole_or_nothing

Progress = Callable[[str, int, int], object]
"""Told of the plan and phase under way, its steps done and in all."""
Golden = Callable[[Path, Path], str]
"""Compares a golden prompt: takes the bundle and the engine's folder, returns what was compared, raises where it
differs."""
NO_GPU = "no GPU that runs the engine answered where it was built"
NO_REFERENCE = "nothing to compare with is installed: pip install 'flashnext-trt[validate,cpu]'"
GRAPH_FILE = "graph.onnx"


def build_engine(
    proposal: Proposal,
    *,
    golden: Golden | None = None,
    note: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda *_: None,
) -> EngineManifest:
    """Build the engine that was proposed; returns its manifest.

    Raises:
        BuildError: too little memory, or a graph cannot be built. Nothing is kept.
        BundleError: the folder cannot be written.
    """
    check_memory(proposal)
    start = time.perf_counter()
    made_parent = _make_parent(proposal.target)
    try:
        with whole_or_nothing(proposal.target, "The engine") as folder:
            manifest = _build_into(folder, proposal, note, progress, start)
            manifest.write(folder)
            if golden and _runs_here(proposal):
                manifest = _checked(manifest, folder, golden(proposal.bundle, folder))
    except BaseException:
        if made_parent:
            proposal.target.parent.rmdir()
        raise
    return manifest


def _make_parent(target: Path) -> bool:
    """Make the folder above the engine's, if need be (`BUNDLE/engines`); whether it was."""
    parent = target.absolute().parent
    if parent.is_dir():
        return False
    try:
        parent.mkdir()
    except OSError as cause:
        raise BuildError(f"{parent} cannot be made ({cause.strerror}); name another folder with --out.") from None
    return True


def _build_into(
    folder: Path, proposal: Proposal, note: Callable[[str], None], progress: Progress, start: float
) -> EngineManifest:
    graphs, version = {}, ""
    for name, plans in proposal.graphs.items():
        graphs[name], version = _build_graph(name, plans, folder, proposal, note, progress)
    return EngineManifest(
        kind=proposal.options.kind,
        tensorrt=version,
        capabilities=proposal.capabilities,
        gpu=proposal.gpu.name if proposal.gpu and proposal.options.kind == "tensorrt" else "",
        bundle=bundle_identity(proposal.bundle),
        checkpoint=proposal.manifest.checkpoint.identity,
        graphs=graphs,
        plugins=proposal.plugins,
        hardware_compatible=proposal.options.hardware_compatible,
        version_compatible=proposal.options.version_compatible,
        golden_note=NO_REFERENCE if _runs_here(proposal) else NO_GPU,
        seconds=round(time.perf_counter() - start, 3),
        producer=f"flashnext-trt {importlib.metadata.version('flashnext-trt')}",
    )


def _runs_here(proposal: Proposal) -> bool:
    return proposal.gpu is not None and proposal.gpu.capability in proposal.capabilities


def _checked(manifest: EngineManifest, folder: Path, what: str) -> EngineManifest:
    passed = dataclasses.replace(manifest, golden_check=PASSED, golden_note=what)
    passed.write(folder)
    return passed


def _build_graph(
    name: str,
    plans: tuple[ProposedPlan, ...],
    folder: Path,
    proposal: Proposal,
    note: Callable[[str], None],
    progress: Progress,
) -> tuple[EngineGraph, str]:
    """Build the plans of one graph; also the version of TensorRT that did it."""
    spec = proposal.manifest.graphs[name]
    source = read_graph(proposal.bundle, spec)
    weights = [t.name for t in spec.inputs if t.role == "weight"]
    made: list[Plan] = []
    profiles: list[Profile] = []
    codes: dict[str, str] = {}
    version = ""
    for plan in plans:
        graph = _form(source, plan, proposal)
        (folder / GRAPH_FILE).write_bytes(graph.model)
        job = _job(plan, proposal)
        progress(plan.file, 0, 0)
        built = build_in_process(job, folder, lambda *step, file=plan.file: progress(f"{file}: {step[0]}", *step[1:]))
        (folder / GRAPH_FILE).unlink()
        made.append(_described(folder, plan, built))
        profiles += [Profile(step, plan.file, i, r) for i, (step, r) in enumerate(plan.profiles.items())]
        codes |= graph.codes
        weights += [w for w in graph.weights if w not in weights]
        version = built.version
        for line in dict.fromkeys(built.warnings):
            note(f"{plan.file}: {line.strip()}")
    in_place = proposal.options.kind == "tensorrt"
    return EngineGraph(tuple(made), tuple(profiles), tuple(weights), dict(spec.states), in_place, codes), version


def _form(source: bytes, plan: ProposedPlan, proposal: Proposal) -> PluginGraph | PortableGraph:
    """The graph as the builder takes it."""
    if proposal.options.kind == "tensorrt":
        return plugin_form(source)
    (step,) = plan.profiles
    return portable_form(source, proposal.manifest.window, step, proposal.options.weights_as_inputs)


def _job(plan: ProposedPlan, proposal: Proposal) -> PlanJob:
    options = proposal.options
    return PlanJob(
        kind=options.kind,
        graph=GRAPH_FILE,
        plan=plan.file,
        weights=str(proposal.weights),
        profiles=tuple(plan.profiles.values()),
        capabilities=proposal.capabilities,
        plugins=str(proposal.plugin_file or ""),
        timing_cache=str(Path(options.timing_cache).absolute()) if options.timing_cache else "",
        hardware_compatible=options.hardware_compatible,
        version_compatible=options.version_compatible,
        workspace=options.workspace,
    )


def _described(folder: Path, plan: ProposedPlan, built: BuiltPlan) -> Plan:
    content = (folder / plan.file).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    took = round(built.seconds, 3), round(built.processor_seconds, 3), built.peak_bytes
    return Plan(plan.file, sha256, len(content), *took)
