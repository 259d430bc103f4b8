"""Compare two engines on one bundle, graph by graph and output by output, through Polygraphy's Comparator.

Why: a graph that builds and runs can still be wrong, so every engine is judged by the PyTorch model. States are not
compared as bytes, because much of that memory is never read; a wrong state shows in the outputs of the steps after
it. Each graph gets the reference's outputs of the graphs before it, so an error is blamed on the graph that makes it.

    report = validate("bundle")
    print(report.passed, report.rows[0])
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, RunResults
from polygraphy.logger import G_LOGGER

from flashnext.export.errors import RequestError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.progress import progress_bar
from flashnext.runtime.engines import open_engine
from flashnext.runtime.engines.base import Array, Engine, numpy_dtype
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.states import allocate_states
from flashnext.runtime.validation_steps import FeedMaker, Step, draft_inputs, draft_step, plan
from flashnext.runtime.weights import load_weights

REFERENCE = "torch:reference"
DRAFT_GRAPH = "mtp_draft"
TOLERANCES = {"float32": 2e-4, "bfloat16": 5e-2}
"""Largest error that passes, in standard deviations of the reference's output. float32: other orders of summation
give about 1e-5 in one layer, and layers add up. bfloat16: one rounding is 4e-3, and each layer adds several."""
FP8_TOLERANCE = 0.1
"""With a residual in FP8 the mean error is judged. A value on the edge between two codes falls to either side in
another order of summation; the layers behind it then see a change of several percent in one column, more values fall
to the other side, and outputs differ by some of what FP8 costs. This finds faults, not last bits: those are compared
op by op in the tests (docs/validation.md)."""


@dataclass(frozen=True)
class OutputError:
    """How far one output of one step is from the reference's; errors are absolute, `deviation` is the reference's."""

    graph: str
    step: str
    output: str
    max_error: float
    mean_error: float
    deviation: float
    tolerance: float
    by_mean: bool = False

    @property
    def relative(self) -> float:
        """The largest error in deviations of the output; the mean one where that is what is judged."""
        return (self.mean_error if self.by_mean else self.max_error) / self.deviation

    def __bool__(self) -> bool:
        """Whether it passes; Polygraphy asks comparison results this way. NaN does not pass."""
        return self.relative <= self.tolerance


@dataclass(frozen=True)
class Report:
    """Every comparison of a bundle."""

    engine: str
    rows: list[OutputError]

    @property
    def passed(self) -> bool:
        return all(self.rows)


class EngineRunner(BaseRunner):  # type: ignore[misc]
    """One of our engines as a Polygraphy runner; its states live as long as the runner's owner keeps them."""

    def __init__(self, name: str, engine: Engine, steps: list[Step]) -> None:
        super().__init__(name=name, prefix=name)
        self._engine = engine
        self._steps = steps
        self._next = 0

    def activate_impl(self) -> None:
        """Start over: the first inference is the first step."""
        self._next = 0

    def get_input_metadata_impl(self) -> TensorMetadata:
        """What a step feeds; weights and states are bound already."""
        metadata = TensorMetadata()
        for spec in self._engine.spec.inputs:
            if spec.role in ("step", "rows", "edge"):
                shape = tuple(d if isinstance(d, int) else None for d in spec.shape)
                metadata.add(spec.name, numpy_dtype(spec.dtype), shape)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        """Run one step; positions without a token read as zero, because nobody may read them."""
        step, self._next = self._steps[self._next], self._next + 1
        start = time.perf_counter()
        outputs = self._engine.run(feed_dict)
        self.inference_time = time.perf_counter() - start
        specs = {t.name: t for t in self._engine.spec.outputs}
        return OrderedDict(
            (name, _masked(value, step) if specs[name].shape[:2] == ("B", "S") else value)
            for name, value in outputs.items()
        )


def _masked(value: Array, step: Step) -> Array:
    keep = step.valid.reshape(*step.valid.shape, *[1] * (value.ndim - 2))
    return np.where(keep, value, np.zeros((), value.dtype))


class DeviationCompare:
    """Polygraphy comparison function: errors relative to the output's standard deviation, kept in `rows`."""

    def __init__(self, tolerance: float, by_mean: bool = False) -> None:
        self.rows: list[OutputError] = []
        self._tolerance, self._by_mean = tolerance, by_mean
        self._graph, self._steps = "", list[Step]()

    def begin(self, graph: str, steps: list[Step]) -> None:
        """The iterations that follow are these steps of this graph."""
        self._graph, self._steps = graph, list(steps)

    def __call__(self, reference: Mapping[str, Array], other: Mapping[str, Array]) -> OrderedDict[str, OutputError]:
        """Compare one iteration."""
        step = self._steps.pop(0)
        found = OrderedDict((name, self._compare(step, name, reference[name], other[name])) for name in reference)
        self.rows += found.values()
        return found

    def _compare(self, step: Step, name: str, reference: Array, other: Array) -> OutputError:
        exact = np.issubdtype(reference.dtype, np.integer)
        if exact:  # the chosen blocks are sets
            reference, other = np.sort(reference), np.sort(other)
        wide = reference.astype(np.float64)
        error = np.abs(wide - other.astype(np.float64))
        largest, mean = (float(error.max()), float(error.mean())) if error.size else (0.0, 0.0)
        # Errors of integers, and of a constant, are related to 1.
        deviation = 1.0 if exact else float(wide.std()) or 1.0
        return OutputError(self._graph, step.name, name, largest, mean, deviation, self._tolerance, self._by_mean)


class Validation:
    """Two engines with states of their own on one bundle."""

    def __init__(self, bundle: Path, engine: str, checkpoint: str | Path | None, threads: int | None) -> None:
        self.manifest = Manifest.read(bundle)
        self._bundle = bundle
        self._kinds = (REFERENCE, engine)
        self._checkpoint = open_checkpoint(self.manifest, checkpoint)
        self._threads = threads
        self._weights = load_weights(self.manifest, self._checkpoint)
        self._states = {kind: allocate_states(self.manifest) for kind in self._kinds}

    def run(self, graph: str, steps: list[Step], feeds: list[dict[str, Array]]) -> RunResults:
        """Both engines over all steps of one graph, the reference first."""
        runners = [EngineRunner(kind, self._open(kind, graph), steps) for kind in self._kinds]
        return Comparator.run(runners, data_loader=feeds, warm_up=0)

    def _open(self, kind: str, graph: str) -> Engine:
        engine = open_engine(kind, graph, self._bundle, self.manifest, self._checkpoint, self._threads)
        wanted = {t.name for t in engine.spec.inputs if t.role in ("weight", "state")}
        bound = {**self._weights, **self._states[kind]}
        engine.bind({name: array for name, array in bound.items() if name in wanted})
        return engine


def validate(
    bundle: str | Path,
    engine: str = "onnxruntime",
    checkpoint: str | Path | None = None,
    *,
    tokens: int = 0,
    seed: int = 0,
    tolerance: float | None = None,
    threads: int | None = None,
) -> Report:
    """Compare an engine with the PyTorch model on seeded steps of every graph.

    `tokens` is the length of the prefill (0: a short one); only one longer than the indexer's budget makes sparse
    attention choose. `tolerance` is in standard deviations of each output.
    """
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise RequestError(f"The tolerance {tolerance} must be a finite number, 0 or more.")
    validation = Validation(Path(bundle), engine, checkpoint, threads)
    manifest = validation.manifest
    in_fp8 = manifest.residual_mode != "plain"
    allowed = FP8_TOLERANCE if in_fp8 else TOLERANCES[manifest.dtype]
    comparison = DeviationCompare(allowed if tolerance is None else tolerance, in_fp8)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):  # the report says it all; Polygraphy would log to standard output
        _compare_graphs(validation, comparison, plan(manifest, tokens), FeedMaker(manifest, seed))
    return Report(engine, comparison.rows)


def _compare_graphs(validation: Validation, comparison: DeviationCompare, steps: list[Step], maker: FeedMaker) -> None:
    known: list[dict[str, Array]] = [{} for _ in steps]
    for graph, spec in _with_progress(validation.manifest.graphs):
        if graph == DRAFT_GRAPH:
            steps, known = [draft_step(steps[-1])], [draft_inputs(validation.manifest, known[-1])]
        feeds = [maker.feeds(spec, i, step, known[i]) for i, step in enumerate(steps)]
        results = validation.run(graph, steps, feeds)
        comparison.begin(graph, steps)
        Comparator.compare_accuracy(results, compare_func=comparison)
        for memory, iteration in zip(known, results[0][1], strict=True):
            memory.update({name: iteration[name] for name in iteration})


def _with_progress(graphs: Mapping[str, GraphSpec]) -> Iterator[tuple[str, GraphSpec]]:
    with progress_bar(len(graphs), "graphs", delay=0) as bar:
        for name, spec in graphs.items():
            bar.set_description(f"comparing {name}")
            yield name, spec
            bar.update()
