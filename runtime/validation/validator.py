"""Compare engines on one bundle with a reference, graph by graph and output by output, through Polygraphy's Comparator.

Why: a graph that builds and runs can still be wrong, so every engine is judged by the PyTorch model, or by outputs of
it that were saved (`flashnext golden`). States are not compared as bytes, because much of that memory is never read; a
wrong state shows in the outputs of the steps after it. Each graph gets the reference's outputs of the graphs before it,
so an error is blamed on the graph that makes it; with `per_layer`, on the block.

    report = validate("bundle", per_layer=True)
    print(report.passed, report.rows[0])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import Comparator, RunResults
from polygraphy.logger import G_LOGGER

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.progress import progress_bar
from flashnext.runtime.counts import check_count, check_threads
from flashnext.runtime.engines import open_engine
from flashnext.runtime.engines.base import Array, Engine
from flashnext.runtime.engines.engine_set import TENSORRT, EngineOptions, EngineSet, StepLimits, open_engines
from flashnext.runtime.golden.folder import GOLDEN, Golden
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.states import allocate_states
from flashnext.runtime.validation.comparison import (
    FP8_TOLERANCE,
    TOLERANCES,
    DeviationCompare,
    Report,
    first_fault,
)
from flashnext.runtime.validation.participants import EngineRunner, SavedRunner, StepRunner
from flashnext.runtime.validation.steps import FeedMaker, Step, draft_inputs, draft_step, plan
from flashnext.runtime.weights import load_weights

REFERENCE = "torch:reference"
DRAFT_GRAPH = "mtp_draft"
MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Wishes:
    """What to compare: `names` are engines or "golden", the reference first; `golden` holds the saved outputs."""

    names: tuple[str, ...]
    golden: Golden | None = None
    per_layer: bool = False
    threads: int | None = None
    engine_path: str | Path | None = None
    providers: Sequence[Any] | None = None
    plugins: str | Path | None = None

    def check(self) -> None:
        """Raise a RequestError for an option of an engine that takes no part."""
        if self.providers and "onnxruntime" not in self.names:
            raise RequestError(
                "providers are for the engine onnxruntime, which takes no part. Name it, or leave them out."
            )
        if (self.engine_path or self.plugins) and not set(TENSORRT) & set(self.names):
            named = "engine_path" if self.engine_path else "plugins"
            raise RequestError(
                f"{named} is for the engines {' and '.join(TENSORRT)}, which take no part. Name one, or leave it out."
            )


class Participants:
    """Engines with states of their own on one bundle, and saved outputs."""

    def __init__(self, bundle: Path, manifest: Manifest, checkpoint: str | Path | None, wishes: Wishes) -> None:
        self.manifest = manifest
        self._bundle, self._wishes = bundle, wishes
        self._checkpoint = open_checkpoint(manifest, checkpoint)
        others = [name for name in wishes.names if name not in (GOLDEN, *TENSORRT)]
        self._weights = load_weights(manifest, self._checkpoint) if others else {}
        self._states = {name: allocate_states(manifest) for name in others}
        self._plans = (
            {} if wishes.per_layer else {name: self._open_plans(name) for name in wishes.names if name in TENSORRT}
        )
        self._opened: list[StepRunner] = []
        """What ran the last graph. The draft layer's two graphs share states; an engine on a device keeps its own copy,
        and the second graph finds it as long as the first is there."""

    def run(self, graph: str, steps: list[Step], feeds: list[dict[str, Array]]) -> RunResults:
        """Everyone over all steps of one graph, the reference first."""
        runners = self._opened = [self._runner(name, graph, steps) for name in self._wishes.names]
        return Comparator.run(runners, data_loader=feeds, warm_up=0)

    @property
    def limits(self) -> StepLimits | None:
        """The largest steps that all engines take."""
        found = [dataclasses.astuple(s.limits) for s in self._plans.values() if s.limits]
        return StepLimits(*map(min, zip(*found, strict=True))) if found else None

    def close(self) -> None:
        """Let go of engines on devices."""
        for opened in self._plans.values():
            opened.close()

    def _runner(self, name: str, graph: str, steps: list[Step]) -> StepRunner:
        golden = self._wishes.golden
        if name == GOLDEN and golden is not None:
            saved = golden.outputs(graph, sites=self._wishes.per_layer)
            return SavedRunner(name, self.manifest.graphs[graph], saved)
        return EngineRunner(name, self._open(name, graph), steps)

    def _open_plans(self, kind: str) -> EngineSet:
        options = EngineOptions(engine_path=self._wishes.engine_path, plugins=self._wishes.plugins)
        return open_engines(kind, self._bundle, self.manifest, self._checkpoint, options, resident=False)

    def _open(self, kind: str, graph: str) -> Engine:
        if kind in self._plans:
            return self._plans[kind].engines[graph]
        engine = open_engine(
            kind,
            graph,
            self._bundle,
            self.manifest,
            self._checkpoint,
            self._wishes.threads,
            watch=self._wishes.per_layer,
            providers=self._wishes.providers if kind == "onnxruntime" else None,
        )
        wanted = {t.name for t in engine.spec.inputs if t.role in ("weight", "state")}
        bound = {**self._weights, **self._states[kind]}
        engine.bind({name: array for name, array in bound.items() if name in wanted})
        return engine


def validate(
    bundle: str | Path,
    engine: str | Sequence[str] = "onnxruntime",
    checkpoint: str | Path | None = None,
    *,
    reference: str | None = None,
    golden: str | Path | None = None,
    per_layer: bool = False,
    tokens: int = 0,
    seed: int = 0,
    tolerance: float | None = None,
    threads: int | None = None,
    engine_path: str | Path | None = None,
    providers: Sequence[Any] | None = None,
    plugins: str | Path | None = None,
) -> Report:
    """Compare engines with a reference on seeded steps of every graph.

    Args:
        engine: one engine, or several.
        reference: an engine, or "golden". By default the saved outputs where there are some, else the PyTorch model.
        golden: folder of `flashnext golden`. Its steps are used, and its outputs take part.
        per_layer: compare what happens at every Gated Residual too, and name the block that is wrong.
        tokens: length of the prefill (0: a short one); only one longer than the indexer's budget makes sparse
            attention choose.
        tolerance: largest error that passes, in standard deviations of each output.
        engine_path: the engine folder of `tensorrt` or `tensorrt-rtx`, where it is not the one for this GPU.
        providers: execution providers of ONNX Runtime, as names or (name, options) pairs.
        plugins: the plugin library of an engine of `tensorrt`, where it is not the one of this installation.

    Raises:
        RequestError: numbers out of range, or options that contradict one another.
        GoldenError: saved outputs of another bundle, or damaged ones.
        BundleError, EngineError: the bundle or an engine cannot be used.
    """
    _check_numbers(tolerance, tokens, seed, threads)
    manifest = Manifest.read(bundle)
    saved = None if golden is None else Golden.open(golden, manifest)
    names = _names(engine, reference, saved, per_layer)
    wishes = Wishes(names, saved, per_layer, threads, engine_path, providers, plugins)
    wishes.check()
    comparison = _comparison(manifest, tolerance)
    participants = Participants(Path(bundle), manifest, checkpoint, wishes)
    try:
        source = SavedSteps(saved) if saved else SeededSteps(manifest, tokens, seed, limits=participants.limits)
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # the report says it all; Polygraphy would log to standard output
            _compare_graphs(participants, comparison, source)
    finally:
        participants.close()
    return _report(manifest, wishes, comparison)


def _check_numbers(tolerance: float | None, tokens: int, seed: int, threads: int | None) -> None:
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise RequestError(f"The tolerance {tolerance} must be a finite number, 0 or more.")
    check_count("tokens", tokens, least=0)
    check_count("seed", seed, MOST_SEED, least=0)
    check_threads(threads)


def _comparison(manifest: Manifest, tolerance: float | None) -> DeviationCompare:
    """What judges; rounding to 8 bits makes single errors large, so mean errors count where there is some."""
    residual_in_fp8, cache_in_fp8 = manifest.residual_mode != "plain", manifest.kv_cache_dtype == "fp8"
    if tolerance is None:
        tolerance = FP8_TOLERANCE if residual_in_fp8 else TOLERANCES[manifest.dtype]
    return DeviationCompare(tolerance, residual_in_fp8 or cache_in_fp8)


def _names(
    engine: str | Sequence[str], reference: str | None, golden: Golden | None, per_layer: bool
) -> tuple[str, ...]:
    """Who takes part, the reference first."""
    engines = [engine] if isinstance(engine, str) else list(engine)
    first = reference or (REFERENCE if golden is None else GOLDEN)
    if GOLDEN in (first, *engines) and golden is None:
        raise RequestError("Saved outputs take part with golden=FOLDER (--golden FOLDER), made by `flashnext golden`.")
    if first == GOLDEN and golden is not None and per_layer and not golden.per_layer:
        raise RequestError(
            f"{golden.folder} has no outputs by layer. Write it with --per-layer, or compare without --per-layer."
        )
    others = [name for name in (*engines, *([GOLDEN] if golden else [])) if name != first]
    if not others:
        raise RequestError(f"{first} cannot be compared with itself alone; name another engine with --engine.")
    return (first, *dict.fromkeys(others))


def _report(manifest: Manifest, wishes: Wishes, comparison: DeviationCompare) -> Report:
    reference, *engines = wishes.names
    found = (first_fault(manifest, [row for row in comparison.rows if row.engine == name]) for name in engines)
    notes: tuple[str, ...] = ()
    if wishes.golden is not None and wishes.golden.checkpoint != manifest.checkpoint.identity:
        notes = (f"The saved outputs are of another checkpoint ({wishes.golden.checkpoint:.12}…) than the bundle's.",)
    return Report(reference, tuple(engines), comparison.rows, [fault for fault in found if fault], notes)


# --- what is fed ------------------------------------------------------------------------------------------------------


class SeededSteps:
    """Steps with random tokens; a graph takes what the reference gave for the same step in the graphs before it."""

    def __init__(
        self, manifest: Manifest, tokens: int, seed: int, ragged: bool = True, limits: StepLimits | None = None
    ) -> None:
        self._manifest = manifest
        self._maker = FeedMaker(manifest, seed)
        self._steps = plan(manifest, tokens, ragged, limits)
        self._known: list[dict[str, Array]] = [{} for _ in self._steps]

    def steps_of(self, graph: str) -> list[Step]:
        """The steps of a graph."""
        return [draft_step(self._steps[-1])] if graph == DRAFT_GRAPH else self._steps

    def of(self, graph: str) -> tuple[list[Step], list[dict[str, Array]]]:
        """The steps of a graph, and what each feeds; graphs in their order."""
        steps, spec = self.steps_of(graph), self._manifest.graphs[graph]
        if graph == DRAFT_GRAPH:
            self._known = [draft_inputs(self._manifest, self._known[-1])]
        numbered = enumerate(zip(steps, self._known, strict=True))
        return steps, [self._maker.feeds(spec, i, step, known) for i, (step, known) in numbered]

    def remember(self, outputs: Sequence[Mapping[str, Array]]) -> None:
        """What the reference gave, step by step."""
        for known, step in zip(self._known, outputs, strict=True):
            known.update({name: step[name] for name in step if "." not in name})


class SavedSteps:
    """The steps that were saved with their inputs."""

    def __init__(self, golden: Golden) -> None:
        self._golden = golden

    def of(self, graph: str) -> tuple[list[Step], list[dict[str, Array]]]:
        """The steps of a graph, and what each feeds."""
        return self._golden.steps(graph), self._golden.feeds(graph)

    def remember(self, outputs: Sequence[Mapping[str, Array]]) -> None:
        """Nothing: inputs that come from another graph were saved too."""


def _compare_graphs(participants: Participants, comparison: DeviationCompare, source: SeededSteps | SavedSteps) -> None:
    for graph, _ in _with_progress(participants.manifest.graphs):
        steps, feeds = source.of(graph)
        results = participants.run(graph, steps, feeds)
        comparison.begin(graph, steps)
        pairs = [(0, other) for other in range(1, len(results))]
        Comparator.compare_accuracy(results, comparisons=pairs, compare_func=comparison)
        source.remember(results[0][1])


def _with_progress(graphs: Mapping[str, GraphSpec]) -> Iterator[tuple[str, GraphSpec]]:
    with progress_bar(len(graphs), "graphs", delay=0) as bar:
        for name, spec in graphs.items():
            bar.set_description(f"comparing {name}")
            yield name, spec
            bar.update()
