"""Runs the PyTorch model over the golden steps and saves what goes in and out, through Polygraphy's own writers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from polygraphy.comparator import RunResults
from polygraphy.json import save_json

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import GoldenError
from flashnext.export.graphs.manifest import GraphSpec, Manifest, TensorSpec
from flashnext.export.progress import progress_bar
from flashnext.runtime.cli.table import amount_of_bytes
from flashnext.runtime.engines import open_engine
from flashnext.runtime.engines.base import Array, Engine, numpy_dtype
from flashnext.runtime.engines.sites import watched_spec
from flashnext.runtime.golden.compare_script import SAVED
from flashnext.runtime.golden.folder import Shaped, file_of, shaped
from flashnext.runtime.golden.unread import without_unread
from flashnext.runtime.states import allocate_states
from flashnext.runtime.validation.participants import masked
from flashnext.runtime.validation.steps import Step
from flashnext.runtime.validation.validator import REFERENCE, SeededSteps
from flashnext.runtime.weights import load_weights

if TYPE_CHECKING:
    from flashnext.runtime.golden.placing import Placing
    from flashnext.runtime.golden.write import GoldenOptions

MOST_STEP_BYTES = 1 << 30
"""Arrays of one step: Polygraphy holds them as text, in several copies, while it writes or reads them."""
TEXT_PER_BYTE = 4 / 3


@dataclass
class Recorded:
    """What was run: steps by graph, the inputs of each with their sizes, and whether these were written raw too."""

    raw: bool
    steps: dict[str, list[Step]] = field(default_factory=dict)
    inputs: dict[str, list[Shaped]] = field(default_factory=dict)


class Recorder:
    """The reference on one bundle, from the first step of the first graph to the last one of the last."""

    def __init__(self, bundle: Path, manifest: Manifest, checkpoint: Checkpoint, options: GoldenOptions) -> None:
        self._bundle, self._manifest, self._checkpoint, self._options = bundle, manifest, checkpoint, options
        self._source = SeededSteps(manifest, options.tokens, options.seed, ragged=False)

    def check_room(self, target: Path, placing: Placing, note: Callable[[str], None]) -> None:
        """Say how large everything becomes.

        Raises:
            GoldenError: it is more than there is room for.
        """
        steps = [self._step_bytes(spec, step) for spec, found in self._planned() for step in found]
        saved = int(sum(steps) * (TEXT_PER_BYTE + self._options.raw))
        note(f"{amount_of_bytes(saved)} of inputs and outputs, {amount_of_bytes(placing.nbytes)} of graphs and weights")
        if max(steps) > MOST_STEP_BYTES:
            raise GoldenError(
                f"One step has {amount_of_bytes(max(steps))} of inputs and outputs, states included; JSON files of "
                f"more than {amount_of_bytes(MOST_STEP_BYTES)} are not usable. Export a bundle for this with a smaller "
                "--capacity and fewer --slots, or leave --weights-as-inputs out."
            )
        placing.check_room(target.absolute().parent, saved)

    def run(self, work: Path) -> Recorded:
        """Run and save every step."""
        found = Recorded(self._options.raw)
        states, weights = allocate_states(self._manifest), load_weights(self._manifest, self._checkpoint)
        extra = weights if self._options.weights_as_inputs else {}
        with progress_bar(len(self._manifest.graphs), "graphs", delay=0) as bar:
            for graph in self._manifest.graphs:
                bar.set_description(f"saving {graph}")
                engine = self._open(graph, {**weights, **states})
                steps, feeds = self._source.of(graph)
                found.steps[graph], outputs = steps, []
                for number, (step, feed) in enumerate(zip(steps, feeds, strict=True)):
                    bound = {n: a for n, a in {**extra, **states}.items() if n in _names(engine.spec.inputs)}
                    self._save_inputs(work, graph, number, step, {**feed, **bound}, found)
                    given = masked(engine.spec, step, engine.run(feed))
                    after = self._after(graph, step, feed["slots"], states)
                    _save_outputs(work, graph, number, {**given, **after})
                    outputs.append(given)
                self._source.remember(outputs)
                bar.update()
        return found

    def _after(self, graph: str, step: Step, slots: Array, states: Mapping[str, Array]) -> dict[str, Array]:
        """The states as outputs."""
        named = self._manifest.graphs[graph].states.items()
        return {out: without_unread(name, states[name], slots, step, self._manifest.window) for name, out in named}

    def _open(self, graph: str, bound: Mapping[str, Array]) -> Engine:
        engine = open_engine(
            REFERENCE,
            graph,
            self._bundle,
            self._manifest,
            self._checkpoint,
            self._options.threads,
            watch=self._options.per_layer,
        )
        engine.bind({name: array for name, array in bound.items() if name in _names(engine.spec.inputs)})
        return engine

    def _save_inputs(
        self, work: Path, graph: str, number: int, step: Step, inputs: Mapping[str, Array], found: Recorded
    ) -> None:
        specs = [t for t in self._manifest.graphs[graph].inputs if t.name in inputs]
        found.inputs.setdefault(graph, []).append(shaped(specs, step))
        path = file_of(work, graph, "inputs", number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json([{t.name: _storable(inputs[t.name]) for t in specs}], str(path))
        if self._options.raw:
            for spec in specs:
                raw = raw_file(work, graph, step, spec.name)
                raw.parent.mkdir(parents=True, exist_ok=True)
                raw.write_bytes(np.ascontiguousarray(inputs[spec.name]).tobytes())

    def _planned(self) -> list[tuple[GraphSpec, list[Step]]]:
        """What will be saved: each graph's specification, with its steps."""
        found = []
        for graph, spec in self._manifest.graphs.items():
            whole = watched_spec(self._manifest, graph) if self._options.per_layer else spec
            found.append((whole, self._source.steps_of(graph)))
        return found

    def _step_bytes(self, spec: GraphSpec, step: Step) -> int:
        inputs = [t for t in spec.inputs if t.role != "weight" or self._options.weights_as_inputs]
        return sum(_nbytes(*tensor) for tensor in (shaped(inputs, step) | shaped(spec.outputs, step)).values())


def raw_file(folder: Path, graph: str, step: Step, name: str) -> Path:
    """Where the bytes of one input are."""
    return folder / graph / "raw" / step.name.replace(" ", "_") / f"{name}.bin"


def _save_outputs(work: Path, graph: str, number: int, outputs: Mapping[str, Array]) -> None:
    results = RunResults()
    results.add([{name: _storable(array) for name, array in outputs.items()}], runner_name=SAVED)
    path = file_of(work, graph, "outputs", number)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.save(str(path))


def _storable(array: Array) -> Any:
    """As Polygraphy stores it: bfloat16, which numpy's format lacks, as a tensor of PyTorch."""
    array = np.array(array)  # a copy: states change in place
    if array.dtype.name != "bfloat16":
        return array
    from flashnext.export.model.loading import to_torch

    return to_torch(array)


def _names(specs: Iterable[TensorSpec]) -> set[str]:
    return {t.name for t in specs}


def _nbytes(spec: TensorSpec, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * numpy_dtype(spec.dtype).itemsize
