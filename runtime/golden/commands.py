"""README.md of a golden folder: the command lines that compare a tool with the saved outputs.

Paths are those of this machine; who carries the files elsewhere changes them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flashnext.export.graphs.manifest import Manifest, TensorSpec
from flashnext.runtime.golden.folder import Shaped, file_of
from flashnext.runtime.golden.graphs import PLUGIN, PORTABLE, RTX
from flashnext.runtime.golden.recorder import Recorded, raw_file

Graphs = Mapping[str, Mapping[str, Path]]
PLUGINS = "libflashnext_plugins.so"
NO_TF32 = "no_tf32.py"

HEAD = """\
# Golden files

Inputs of a bundle's graphs, and the outputs of the PyTorch model ({dtype}; seed and steps are in golden.json). States
are inputs and outputs. `compare.py` judges errors in standard deviations of each output and names the module behind the
first one that is too large; a command ends with 1 if there is one. NaN is saved where no engine reads a state, and not
compared. Polygraphy 0.53 or newer; files of bfloat16 need PyTorch beside it.

"""
ONNXRUNTIME = "## ONNX Runtime, portable graphs\n\n"
TENSORRT = f"""\
## TensorRT, plugin graphs

`{PLUGINS}` is what `flashnext plugins path` prints. Not yet run on a GPU.

"""
TENSORRT_RTX = """\
## TensorRT for RTX, portable graphs of plain operators

For steps of at most {window} tokens a sequence; a step each. `no_tf32.py` turns off TF32, which is on by default. Built
without a GPU by the same options of `polygraphy convert --convert-to trt --compute-capabilities 12.0`; not yet run.

"""
TRTEXEC = """\
## trtexec, plugin graphs

Runs one step and writes its outputs as JSON; it compares nothing. Not yet run on a GPU.

"""
NO_RAW = "trtexec reads raw bytes: write the golden files with `--raw` to have them, and the command lines.\n"


def page(manifest: Manifest, folder: Path, graphs: Graphs, found: Recorded) -> str:
    """The text of README.md."""
    parts = [HEAD.format(dtype=manifest.dtype)]
    if manifest.dtype == "float32":
        parts += [ONNXRUNTIME, *_block(onnxruntime_line(folder, g, graphs) for g in graphs)]
    parts += [TENSORRT, *_block(tensorrt_line(folder, g, graphs, found.inputs[g]) for g in graphs)]
    if lines := [line for g in graphs for line in rtx_lines(manifest, folder, g, graphs, found)]:
        parts += [TENSORRT_RTX.format(window=manifest.window), *_block(lines)]
    parts.append(TRTEXEC)
    raw = [line for g in graphs for line in trtexec_lines(folder, g, graphs, found)]
    parts += _block(raw) if raw else [NO_RAW]
    return "".join(parts)


def _block(lines: Iterator[str] | Sequence[str]) -> list[str]:
    return ["```sh\n", "\n\n".join(lines), "\n```\n\n"]


def onnxruntime_line(folder: Path, graph: str, graphs: Graphs) -> str:
    """Portable graph in ONNX Runtime against the saved outputs."""
    return _line(["polygraphy", "run", str(graphs[graph][PORTABLE]), "--onnxrt"], *_saved(folder, graph))


def tensorrt_line(folder: Path, graph: str, graphs: Graphs, inputs: Sequence[Shaped]) -> str:
    """Plugin graph built by TensorRT for the shapes of the steps, against the saved outputs."""
    tool = ["polygraphy", "run", str(graphs[graph][PLUGIN]), "--trt", "--strongly-typed", "--plugins", PLUGINS]
    ranges = [f"--trt-{which}-shapes {_shapes(inputs, which)}" for which in ("min", "opt", "max")]
    return _line(tool, *ranges, *_saved(folder, graph))


def rtx_lines(manifest: Manifest, folder: Path, graph: str, graphs: Graphs, found: Recorded) -> Iterator[str]:
    """Graph of plain operators built by TensorRT for RTX, against the outputs of each short step."""
    for number, step in enumerate(found.steps[graph]):
        if RTX not in graphs[graph] or step.tokens > manifest.window:
            continue
        tool = ["polygraphy", "run", str(graphs[graph][RTX]), "--trt"]
        shapes = _shapes(found.inputs[graph][number : number + 1], "opt")
        ranges = [f"--trt-{which}-shapes {shapes}" for which in ("min", "opt", "max")]
        script = f"--trt-config-postprocess-script {shlex.quote(str(folder.absolute() / NO_TF32))}"
        yield "POLYGRAPHY_USE_TENSORRT_RTX=1 " + _line(tool, *ranges, script, *_saved(folder, graph, number))


def trtexec_lines(folder: Path, graph: str, graphs: Graphs, found: Recorded) -> Iterator[str]:
    """One line for each step whose raw inputs were written."""
    for step, inputs in zip(found.steps[graph], found.inputs[graph], strict=True):
        if not found.raw:
            return
        files = {name: raw_file(folder.absolute(), graph, step, name) for name in inputs}
        moving = {name: shape for name, (spec, shape) in inputs.items() if _is_dynamic(spec)}
        shapes = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in moving.items())
        yield _line(
            ["trtexec", f"--onnx={graphs[graph][PLUGIN]}", f"--dynamicPlugins={PLUGINS}"],
            "--stronglyTyped --noTF32",
            f"--shapes={shapes}",
            "--loadInputs=" + shlex.quote(",".join(f"{name}:{file}" for name, file in files.items())),
            f"--exportOutput={graph}.{step.name.replace(' ', '_')}.json",
        )


def _saved(folder: Path, graph: str, number: int | None = None) -> list[str]:
    """Options for the saved files: of every step, or of one."""
    place = folder.absolute()
    kinds = ("inputs", "outputs")
    paths = [place / graph / kind if number is None else file_of(place, graph, kind, number) for kind in kinds]
    return [
        *(f"--load-{kind} {shlex.quote(str(path))}" for kind, path in zip(kinds, paths, strict=True)),
        f"--compare-func-script {shlex.quote(str(place / 'compare.py'))}",
    ]


def _shapes(inputs: Sequence[Shaped], which: str) -> str:
    """Smallest, largest or last shapes of all steps; a decode step comes last and is what is to be fast.

    Shapes that no step changes stand in the graph.
    """
    pick = {"min": min, "max": max, "opt": lambda sizes: list(sizes)[-1]}[which]
    shown = []
    for name in (n for n, (spec, _) in inputs[0].items() if _is_dynamic(spec)):
        sizes = zip(*(step[name][1] for step in inputs), strict=True)
        shown.append(f"{name}:[{','.join(str(pick(size)) for size in sizes)}]")  # type: ignore[operator]
    return " ".join(shown)


def _is_dynamic(spec: TensorSpec) -> bool:
    return any(isinstance(size, str) for size in spec.shape)


def _line(words: Sequence[str], *options: str) -> str:
    """A command over several lines."""
    return " \\\n    ".join([shlex.join(words), *options])
