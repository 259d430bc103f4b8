"""How far the outputs of one engine are from the reference's, and where that begins.

Errors are related to the standard deviation of the reference's output. `DeviationCompare` is a comparison function of
Polygraphy's Comparator; `first_fault` reads its rows in the order in which the model computes, so that the first output
beyond its tolerance names the block that is wrong.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashnext.export.graphs.io import layers_of
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.sites import sites
from flashnext.runtime.validation.steps import Step

TOLERANCES = {"float32": 2e-4, "bfloat16": 5e-2}
"""Largest error that passes, in standard deviations of the reference's output. float32: other orders of summation
give about 1e-5 in one layer, and layers add up. bfloat16: one rounding is 4e-3, and each layer adds several."""
FP8_TOLERANCE = 0.1
"""With a residual in FP8 the mean error is judged. A value on the edge between two codes falls to either side in
another order of summation; the layers behind it then see a change of several percent in one column, more values fall
to the other side, and outputs differ by some of what FP8 costs. This finds faults, not last bits: those are compared
op by op in the tests (docs/validation.md).

Keys and values in FP8 are judged by the mean error too, but within TOLERANCES: a key on the edge between two codes
moves the outputs of few tokens, and nothing is rounded on top of it. Without its rounding the small model's logits are
2e-3 away on average."""
NOISE = 1e-6
"""Errors below this are not told apart when looking for where they rise: float32 itself rounds by 6e-8 of a value."""


@dataclass(frozen=True)
class OutputError:
    """How far one output of one step is from the reference's; errors are absolute, `deviation` is the reference's."""

    engine: str
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
class Fault:
    """The first output beyond its tolerance, the module to look at, and where the error rose most on the way there.

    `rise` is the output at which the error grew by the largest factor, up to and including the first fault;
    `rise_suspect` the module behind it. Without `--per-layer` a fault names its graph only.
    """

    row: OutputError
    suspect: str
    rise: OutputError | None = None
    rise_suspect: str = ""
    factor: float = 1.0

    def __str__(self) -> str:
        row = self.row
        text = (
            f"{row.engine} first differs at {row.output} (graph {row.graph}, step {row.step}): {row.relative:.1e}, "
            f"tolerance {row.tolerance:.1e}. Look at {self.suspect}."
        )
        if self.rise is not None and self.rise_suspect != self.suspect:
            text += (
                f" The error rises most, {self.factor:.0f} times to {self.rise.relative:.1e}, at {self.rise.output}: "
                f"{self.rise_suspect}."
            )
        return text


@dataclass(frozen=True)
class Report:
    """Every comparison of a bundle with one reference. `notes` are remarks on what was compared."""

    reference: str
    engines: tuple[str, ...]
    rows: list[OutputError]
    faults: list[Fault]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(self.rows)

    def of_sites(self) -> list[OutputError]:
        """What `--per-layer` adds: the outputs of sites."""
        return [row for row in self.rows if is_site(row)]


def is_site(row: OutputError) -> bool:
    """Whether an output belongs to a site inside the graph (`<module>.<port>`; a graph's own have no dot)."""
    return "." in row.output


class DeviationCompare:
    """Polygraphy comparison function: errors relative to the output's standard deviation, kept in `rows`."""

    def __init__(self, tolerance: float, by_mean: bool = False) -> None:
        self.rows: list[OutputError] = []
        self._tolerance, self._by_mean = tolerance, by_mean
        self._graph, self._steps = "", list[Step]()
        self._seen: Counter[str] = Counter()

    def begin(self, graph: str, steps: Sequence[Step]) -> None:
        """The iterations that follow are these steps of this graph, for each engine from the first."""
        self._graph, self._steps, self._seen = graph, list(steps), Counter()

    def __call__(self, reference: Mapping[str, Array], other: Mapping[str, Array]) -> OrderedDict[str, OutputError]:
        """Compare one iteration; outputs that the reference does not have are left alone."""
        engine = str(getattr(other, "runner_name", ""))
        step = self._steps[self._seen[engine]]
        self._seen[engine] += 1
        both = [name for name in reference if name in other]
        found = OrderedDict((n, self._compare(engine, step, n, reference[n], other[n])) for n in both)
        self.rows += found.values()
        return found

    def _compare(self, engine: str, step: Step, name: str, reference: Array, other: Array) -> OutputError:
        exact = np.issubdtype(reference.dtype, np.integer)
        if exact:  # the chosen blocks are sets
            reference, other = np.sort(reference), np.sort(other)
        wide = reference.astype(np.float64)
        error = np.abs(wide - other.astype(np.float64))
        largest, mean = (float(error.max()), float(error.mean())) if error.size else (0.0, 0.0)
        # Errors of integers, and of a constant, are related to 1.
        deviation = 1.0 if exact else float(wide.std()) or 1.0
        judged = (self._tolerance, self._by_mean)
        return OutputError(engine, self._graph, step.name, name, largest, mean, deviation, *judged)


# --- where it begins --------------------------------------------------------------------------------------------------


def first_fault(manifest: Manifest, rows: Sequence[OutputError]) -> Fault | None:
    """The first output of one engine beyond its tolerance; rows come graph by graph and step by step."""
    failed = next((row for row in rows if not row), None)
    if failed is None:
        return None
    same = [row for row in rows if (row.graph, row.step) == (failed.graph, failed.step)]
    modules = suspects(manifest, failed.graph)
    places = list(modules)
    inside = sorted((r for r in same if r.output in modules), key=lambda r: places.index(r.output))
    if not inside:
        return Fault(failed, f"the graph {failed.graph}; --per-layer names the block")
    first = next((row for row in inside if not row), None)
    if first is None:
        return Fault(failed, _behind_sites(manifest, failed))
    rise, factor = _rise(inside[: inside.index(first) + 1])
    return Fault(first, modules[first.output], rise, modules[rise.output], factor)


def _behind_sites(manifest: Manifest, row: OutputError) -> str:
    """Where to look when every site is right: at what comes behind the last one."""
    last = max(layers_of(manifest.config, row.graph), default=0)
    behind = {"logits": "lm_head", "y": f"layers.{last}.mlp"}
    return behind.get(row.output, f"the end of the graph {row.graph}")


def suspects(manifest: Manifest, graph: str) -> dict[str, str]:
    """Outputs of the graph's sites in the model's order, and the module to look at for each."""
    return {
        spec.name: site.suspect(spec.name.rsplit(".", 1)[1])
        for site in sites(manifest, graph)
        for spec in site.ports.values()
    }


def _rise(rows: Sequence[OutputError]) -> tuple[OutputError, float]:
    """Where the error grows most over the largest one before it."""
    best, factor, before = rows[0], 0.0, NOISE
    for row in rows:
        value = row.relative if np.isfinite(row.relative) else np.inf
        if value / before > factor:
            best, factor = row, value / before
        before = max(before, value)
    return best, factor
