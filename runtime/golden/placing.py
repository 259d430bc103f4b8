"""Where the graphs of golden files go: beside the checkpoint's files that they point into, or with copies of those.

Tools look for external data beside a graph and follow no path that leaves its folder. Beside the checkpoint, names
begin with the golden folder's and eight digits of its path (`golden-1f2e3d4c.body.onnx`): two folders of one name keep
their graphs apart, and whoever writes a folder again knows which graphs were its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import GoldenError
from flashnext.export.graphs.beside import named_together, prefix, remove_others
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.table import amount_of_bytes
from flashnext.runtime.golden import graphs
from flashnext.runtime.golden.graphs import PORTABLE, WeightFile

if TYPE_CHECKING:
    from flashnext.runtime.golden.write import GoldenOptions

Models = Mapping[str, Mapping[str, onnx.ModelProto]]
RESERVE = 64 << 20
"""Room that is left over on a disk."""


@dataclass(frozen=True)
class Placing:
    """The graphs, and the files that belong to them; `beside` is the checkpoint's folder, None for the golden one."""

    target: Path
    beside: Path | None
    models: Models
    weights: WeightFile
    checkpoint: Checkpoint
    copied: tuple[str, ...]

    @classmethod
    def plan(
        cls, bundle: Path, target: Path, manifest: Manifest, checkpoint: Checkpoint, options: GoldenOptions
    ) -> Placing:
        """Make the graphs, without writing anything."""
        beside = None if options.copy_weights else checkpoint.common_parent
        weights = WeightFile(f"{prefix(target) if beside else ''}weights.bin")
        inside = None if options.weights_as_inputs else weights
        models = graphs.build(bundle, manifest, checkpoint, inside, options.per_layer)
        needed = set().union(*(graphs.files_of(m) for forms in models.values() for m in forms.values()))
        copied = () if beside else tuple(sorted(needed - {weights.name}))
        return cls(target, beside, models, weights, checkpoint, copied)

    @property
    def nbytes(self) -> int:
        """Of graphs and weights together."""
        models: int = sum(m.ByteSize() for forms in self.models.values() for m in forms.values())
        copies = sum((self.checkpoint.common_parent / name).stat().st_size for name in self.copied)
        return models + self.weights.nbytes + copies

    def check_room(self, folder: Path, saved: int) -> None:
        """Whether the arrays (`saved` bytes) and the graphs fit.

        Raises:
            GoldenError: they do not, or the checkpoint's folder cannot be written to.
        """
        if self.beside is not None and not os.access(self.beside, os.W_OK | os.X_OK):
            raise GoldenError(
                f"{self.beside} cannot be written to, and graphs have to lie beside the weights that they point into. "
                "Add --copy-weights to put both into the golden folder."
            )
        places = [(folder, saved), (self.beside or folder, self.nbytes)]
        for place, _ in places:
            device = place.stat().st_dev
            needed = sum(size for other, size in places if other.stat().st_dev == device) + RESERVE
            free = shutil.disk_usage(place).free
            if needed > free:
                raise GoldenError(
                    f"The golden files need {amount_of_bytes(needed)} at {place}, where {amount_of_bytes(free)} are "
                    "free. Make room, or export a bundle for this with a smaller --capacity and fewer --slots."
                )

    @contextmanager
    def written(self, work: Path) -> Iterator[dict[str, dict[str, Path]]]:
        """Write the graphs; inside, where they will be, by name and form.

        Beside the checkpoint they take the place of an earlier run's graphs once the block ends well, and vanish if it
        fails.
        """
        for name in self.copied:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoint.common_parent / name, work / name)
        place = self.beside or self.target
        paths = {
            graph: {form: place / self.file_name(graph, form) for form in forms} for graph, forms in self.models.items()
        }
        with named_together(self.beside or work) as path_of:
            self.weights.write(path_of(self.weights.name), self.checkpoint)
            for graph, forms in self.models.items():
                for form, model in forms.items():
                    path_of(paths[graph][form].name).write_bytes(model.SerializeToString())
            yield paths
        remove_others(self.checkpoint.common_parent, prefix(self.target), self._names_beside())

    def _names_beside(self) -> list[str]:
        """What this run has put beside the checkpoint."""
        if self.beside is None:
            return []
        names = [self.file_name(graph, form) for graph, forms in self.models.items() for form in forms]
        return names + [self.weights.name] * bool(self.weights.nbytes)

    def file_name(self, graph: str, form: str) -> str:
        """`body.onnx`, and `body.plugin.onnx` for plugins; beside the checkpoint with a prefix."""
        suffix = "" if form == PORTABLE else f".{form}"
        return f"{prefix(self.target) if self.beside else ''}{graph}{suffix}.onnx"
