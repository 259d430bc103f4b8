"""`flashnext golden`: inputs of a bundle's graphs and the PyTorch model's outputs, as files of Polygraphy.

Every state is an input and an output, with the values that it has before and after the step: a tool that keeps nothing
between iterations can run any of them. The rows of these steps are full, since what an engine writes into a state's
last row, for positions without a token, is its own affair.

    write_golden("bundle", "golden", GoldenOptions(per_layer=True))
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polygraphy.logger import G_LOGGER

from flashnext.export.errors import GoldenError
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.graphs.whole_folder import whole_or_nothing
from flashnext.runtime.counts import check_threads
from flashnext.runtime.golden import commands, compare_script, folder, tf32_script
from flashnext.runtime.golden.placing import Placing
from flashnext.runtime.golden.recorder import Recorder
from flashnext.runtime.model_runner import open_checkpoint
from flashnext.runtime.validation.comparison import TOLERANCES, suspects
from flashnext.runtime.validation.steps import Step
from flashnext.runtime.validation.validator import REFERENCE

STORABLE = ("float32", "bfloat16", "int32")
"""dtypes that Polygraphy can hold, numpy's or PyTorch's."""


@dataclass(frozen=True)
class GoldenOptions:
    """What to write.

    `per_layer` saves what happens at every Gated Residual too; `raw` writes the inputs for trtexec as well.
    `weights_as_inputs` feeds embedding, LM head and experts, as engines take them; without it they are inside the
    graphs. `copy_weights` makes the folder complete: the graphs lie in it, with the checkpoint's files that they need,
    and not beside the checkpoint.
    """

    per_layer: bool = False
    weights_as_inputs: bool = False
    copy_weights: bool = False
    raw: bool = False
    tokens: int = 0
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class Written:
    """What was written: the folder, the graphs by name and form, and the text of README.md."""

    folder: Path
    graphs: Mapping[str, Mapping[str, Path]]
    readme: str


def write_golden(
    bundle: str | Path,
    out: str | Path,
    options: GoldenOptions | None = None,
    checkpoint: str | Path | None = None,
    *,
    note: Callable[[str], None] = lambda _: None,
) -> Written:
    """Write golden files of a bundle; `note` is told their size before anything is written.

    Raises:
        GoldenError: there is no room, the arrays are too large for JSON, or the folder is in use.
        BundleError: the bundle or its checkpoint cannot be used.
    """
    options = options or GoldenOptions()
    source, target = Path(bundle), Path(out)
    manifest = Manifest.read(source)
    _check(manifest, options)
    _check_target(target)
    weights = open_checkpoint(manifest, checkpoint)
    recorder = Recorder(source, manifest, weights, options)
    placing = Placing.plan(source, target, manifest, weights, options)
    recorder.check_room(target, placing, note)
    with whole_or_nothing(target, "The golden folder") as work, G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        found = recorder.run(work)
        with placing.written(work) as graphs:
            readme = commands.page(manifest, placing.beside, graphs, found)
            (work / "README.md").write_text(readme, encoding="utf-8")
            for script, name in ((compare_script, commands.SCRIPT), (tf32_script, commands.NO_TF32)):
                shutil.copyfile(str(script.__file__), work / name)
            _write_facts(work, manifest, options, found.steps)
    return Written(target, graphs, readme)


def _check(manifest: Manifest, options: GoldenOptions) -> None:
    check_threads(options.threads)
    ports = [t for graph in manifest.graphs.values() for t in graph.inputs if t.role != "weight"]
    if bad := next((t for t in ports if t.dtype not in STORABLE), None):
        raise GoldenError(
            f"Polygraphy has no 8-bit floats, and this bundle's graphs take {bad.name} as {bad.dtype}. Write golden "
            "files of a bundle exported with --residual plain and without --kv-cache-dtype, or compare this one with: "
            "flashnext validate"
        )
    if options.weights_as_inputs and any(w.dtype == "uint8" for w in manifest.weights):
        raise GoldenError(
            "Polygraphy has no 8-bit floats, and the checkpoint's experts are quantized. "
            "Leave their weights in the graphs: leave --weights-as-inputs out."
        )
    if options.weights_as_inputs and options.copy_weights:
        raise GoldenError(
            "--weights-as-inputs saves the weights with every step and --copy-weights with the graphs; choose one."
        )


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise GoldenError(f"{target} is a file; name a folder for the golden files.")
    if target.is_dir() and any(target.iterdir()) and not (target / folder.FILE_NAME).is_file():
        raise GoldenError(f"{target} holds files that are not golden files; name another folder.")
    if not target.absolute().parent.is_dir():
        raise GoldenError(f"{target.absolute().parent} is not a folder; make it first, or name another folder.")


def _write_facts(work: Path, manifest: Manifest, options: GoldenOptions, steps: Mapping[str, list[Step]]) -> None:
    facts = {
        "format_version": folder.FORMAT_VERSION,
        "producer": f"flashnext-trt {importlib.metadata.version('flashnext-trt')}",
        "reference": REFERENCE,
        "checkpoint": manifest.checkpoint.identity,
        **{name: getattr(manifest, name) for name in folder.SIZES},
        "per_layer": options.per_layer,
        "weights_as_inputs": options.weights_as_inputs,
        "seed": options.seed,
        "tolerance": TOLERANCES[manifest.dtype],
        "suspects": {name: module for graph in manifest.graphs for name, module in suspects(manifest, graph).items()},
        "steps": {graph: [dataclasses.asdict(step) for step in found] for graph, found in steps.items()},
    }
    (work / folder.FILE_NAME).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
