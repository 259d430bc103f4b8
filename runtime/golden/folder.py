"""A folder of golden files: what lies where, and reading it.

    golden.json                     whose they are, and the steps of every graph
    README.md                       the command lines that use them
    <graph>/inputs/0000000000.json  what a step feeds, states included: a list of one mapping (Polygraphy's save_json)
    <graph>/outputs/0000000000.json what it gives: Polygraphy's RunResults of one iteration

Polygraphy takes a folder of such files for the iterations of one run. The folder is data from strangers: `Golden`
checks it against the bundle, whose manifest says the dtype and shape of everything, and follows no link inside of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashnext.export.errors import GoldenError
from flashnext.export.files import plain
from flashnext.export.graphs.manifest import Manifest, TensorSpec
from flashnext.export.versioned_json import VersionedJson
from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.sites import watched_spec
from flashnext.runtime.golden import arrays
from flashnext.runtime.golden.feed_checks import check_step, feed_faults
from flashnext.runtime.validation.steps import Step

GOLDEN = "golden"
"""Their name among the engines of a comparison."""
FILE_NAME = "golden.json"
FORMAT_VERSION = 1
FED_ROLES = ("step", "rows", "edge")
FILE = VersionedJson("golden files", FORMAT_VERSION, 1 << 20, GoldenError, "Write it again with `flashnext golden`.")
SIZES = ("dtype", "window", "capacity", "slots", "residual_mode", "recurrent_dtype", "kv_cache_dtype")
"""Entries of a manifest on which inputs and outputs depend, beside the model itself."""

Shaped = dict[str, tuple[TensorSpec, tuple[int, ...]]]


def file_of(folder: Path, graph: str, kind: str, number: int) -> Path:
    """Where the inputs or outputs of a step are; the name's width is Polygraphy's."""
    return folder / graph / kind / f"{number:010d}.json"


def refuse_links(folder: Path, path: Path) -> None:
    """Refuse a file of the folder that is somewhere else: what a link shows belongs to whoever reads, not to the files.

    Raises:
        GoldenError: the file, or a folder on the way to it, is a symbolic link.
    """
    inside = path.relative_to(folder).parts
    for place in (folder.joinpath(*inside[:depth]) for depth in range(1, len(inside) + 1)):
        if place.is_symlink():
            raise GoldenError(
                f"{place} is a symbolic link; golden files lie in their own folder. "
                "Write it again with `flashnext golden`, or copy the folder with `cp -rL`."
            )


def shaped(specs: Iterable[TensorSpec], step: Step) -> Shaped:
    """Tensors of a step by name, with their sizes."""
    sizes = {"B": len(step.new_len), "S": step.tokens, "N": int(step.valid.sum())}
    return {t.name: (t, tuple(sizes[d] if isinstance(d, str) else d for d in t.shape)) for t in specs}


class Golden:
    """A folder of golden files that fits a bundle."""

    def __init__(self, folder: Path, manifest: Manifest, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.per_layer: bool = facts["per_layer"]
        self.checkpoint: str = facts["checkpoint"]
        """Identity of the checkpoint whose outputs these are."""
        self._manifest = manifest
        self._steps = {graph: [_step(raw) for raw in steps] for graph, steps in facts["steps"].items()}

    @classmethod
    def open(cls, folder: str | Path, manifest: Manifest) -> Golden:
        """Read `golden.json` and compare it with a bundle.

        Raises:
            GoldenError: there is none, it is damaged, or of a bundle with other inputs.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise GoldenError(f"{folder} holds no golden files (no {FILE_NAME}). Make them with: flashnext golden "
                              f"BUNDLE --out {folder}")  # fmt: skip
        refuse_links(Path(folder), path)
        facts = FILE.read(path)
        _check_sizes(path, facts, manifest)
        with FILE.parsing(path):
            found = cls(Path(folder), manifest, facts)
            found._check()
        return found

    def steps(self, graph: str) -> list[Step]:
        """The steps of a graph."""
        return self._steps[graph]

    def feeds(self, graph: str) -> list[dict[str, Array]]:
        """What each step feeds, without weights and states.

        Raises:
            GoldenError: a file is missing, damaged or of another bundle.
        """
        spec = self._manifest.graphs[graph]
        fed = [t for t in spec.inputs if t.role in FED_ROLES]
        found = [self._read(graph, i, step, "inputs", spec.inputs, fed) for i, step in enumerate(self.steps(graph))]
        for number, (step, feed) in enumerate(zip(self.steps(graph), found, strict=True)):
            if fault := next(feed_faults(feed, step, self._manifest), None):
                path = file_of(self.folder, graph, "inputs", number)
                raise GoldenError(f"{path} has {fault}. Write it again with `flashnext golden`.")
        return found

    def outputs(self, graph: str, sites: bool = False) -> list[dict[str, Array]]:
        """What each step gave, without states; `sites`: with the outputs by layer, where they were saved.

        Raises:
            GoldenError: a file is missing, damaged or of another bundle.
        """
        spec = watched_spec(self._manifest, graph) if self.per_layer else self._manifest.graphs[graph]
        given = [t for t in spec.outputs if t.role != "state" and (sites or t.role != "site")]
        return [self._read(graph, i, step, "outputs", spec.outputs, given) for i, step in enumerate(self.steps(graph))]

    def _read(
        self, graph: str, number: int, step: Step, kind: str, there: Iterable[TensorSpec], wanted: Iterable[TensorSpec]
    ) -> dict[str, Array]:
        path = file_of(self.folder, graph, kind, number)
        refuse_links(self.folder, path)
        content = arrays.read_text(path, shaped(there, step))
        try:
            values = content[0] if kind == "inputs" else content["lst"][0][1][0]["outputs"]
            found = {name: values[name] for name in shaped(wanted, step)}
        except (KeyError, TypeError, IndexError) as cause:
            raise GoldenError(
                f"{path} lacks something ({plain(repr(cause), 80)}). Write it again with `flashnext golden`."
            ) from None
        return {name: arrays.decode(found[name], *spec, path) for name, spec in shaped(wanted, step).items()}

    def _check(self) -> None:
        if set(self._steps) != set(self._manifest.graphs):
            raise ValueError(f"its graphs are {sorted(self._steps)!s:.80}")
        if not isinstance(self.per_layer, bool) or not isinstance(self.checkpoint, str):
            raise TypeError("per_layer and checkpoint")
        for steps in self._steps.values():
            for step in steps:
                check_step(step, self._manifest)


def _check_sizes(path: Path, facts: Mapping[str, Any], manifest: Manifest) -> None:
    for name in SIZES:
        if facts.get(name) != getattr(manifest, name):
            raise GoldenError(
                f"{path} was written for a bundle with {name} = {facts.get(name)!r:.40}; this one has "
                f"{getattr(manifest, name)!r}. Write it again with `flashnext golden`, or take the other bundle."
            )


def _step(raw: Mapping[str, Any]) -> Step:
    values = {f.name: raw[f.name] for f in dataclasses.fields(Step)}
    lengths = {name: tuple(map(_whole, values[name])) for name in ("past_len", "accepted", "new_len")}
    return Step(str(values["name"])[:40], _whole(values["tokens"]), **lengths)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a whole number, found {value!r:.40}")
    return value
