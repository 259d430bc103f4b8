"""README.md of a golden folder: the command lines that compare a tool with the saved outputs.

Paths are relative to the folder, where the lines are run, so it can be carried elsewhere as it is. What lies outside
of it is named once, in variables of the shell above all lines.
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
PLUGINS = '"$PLUGINS"'
CHECKPOINT = '"$CHECKPOINT"'
"""Variables of the shell, as the command lines name them."""
SCRIPT, NO_TF32 = "compare.py", "no_tf32.py"
HERE = Path()

HEAD = """\
# Golden files

Inputs of a bundle's graphs, and the outputs of the PyTorch model ({dtype}; seed and steps are in golden.json). States
are inputs and outputs. `compare.py` judges errors in standard deviations of each output and names the module behind the
first one that is too large; a command ends with 1 if there is one. NaN is saved where no engine reads a state, and not
compared. Polygraphy 0.53 or newer; files of bfloat16 need PyTorch beside it.

Run the lines in the folder of this README.md. Other places are named here alone; on another machine, change them:

"""
PLUGINS_PLACE = (
    "PLUGINS=./libflashnext_plugins.so  # a copy of the plugin library; `flashnext plugins path` says where it is"
)
CHECKPOINT_PLACE = "CHECKPOINT={folder}  # the graphs lie beside the weights that they point into"
ONNXRUNTIME = "## ONNX Runtime, portable graphs\n\n"
TENSORRT = """\
## TensorRT, plugin graphs

Not yet run on a GPU.

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


def page(manifest: Manifest, beside: Path | None, graphs: Graphs, found: Recorded) -> str:
    """The text of README.md; `beside` is the checkpoint's folder where the graphs lie in it."""
    places = [PLUGINS_PLACE]
    if beside is not None:
        places.insert(0, CHECKPOINT_PLACE.format(folder=shlex.quote(str(beside))))
    parts = [HEAD.format(dtype=manifest.dtype), "```sh\n", "\n".join(places), "\n```\n\n"]
    words = {graph: {form: _word(path, beside) for form, path in forms.items()} for graph, forms in graphs.items()}
    if manifest.dtype == "float32":
        parts += [ONNXRUNTIME, *_block(onnxruntime_line(g, words[g][PORTABLE]) for g in words)]
    parts += [TENSORRT, *_block(tensorrt_line(g, words[g][PLUGIN], found.inputs[g]) for g in words)]
    if lines := [line for g in words if RTX in words[g] for line in rtx_lines(manifest, g, words[g][RTX], found)]:
        parts += [TENSORRT_RTX.format(window=manifest.window), *_block(lines)]
    parts.append(TRTEXEC)
    raw = [line for g in words for line in trtexec_lines(g, words[g][PLUGIN], found)]
    parts += _block(raw) if raw else [NO_RAW]
    return "".join(parts)


def _word(path: Path, beside: Path | None) -> str:
    """A graph's place as a word of the shell."""
    name = shlex.quote(path.name)
    return name if beside is None else f"{CHECKPOINT}/{name}"


def _block(lines: Iterator[str] | Sequence[str]) -> list[str]:
    return ["```sh\n", "\n\n".join(lines), "\n```\n\n"]


def onnxruntime_line(graph: str, model: str) -> str:
    """Portable graph in ONNX Runtime against the saved outputs."""
    return _line(f"polygraphy run {model} --onnxrt", *_saved(graph))


def tensorrt_line(graph: str, model: str, inputs: Sequence[Shaped]) -> str:
    """Plugin graph built by TensorRT for the shapes of the steps, against the saved outputs."""
    ranges = [f"--trt-{which}-shapes {_shapes(inputs, which)}" for which in ("min", "opt", "max")]
    return _line(f"polygraphy run {model} --trt --strongly-typed --plugins {PLUGINS}", *ranges, *_saved(graph))


def rtx_lines(manifest: Manifest, graph: str, model: str, found: Recorded) -> Iterator[str]:
    """Graph of plain operators built by TensorRT for RTX, against the outputs of each short step."""
    for number, step in enumerate(found.steps[graph]):
        if step.tokens > manifest.window:
            continue
        shapes = _shapes(found.inputs[graph][number : number + 1], "opt")
        ranges = [f"--trt-{which}-shapes {shapes}" for which in ("min", "opt", "max")]
        script = f"--trt-config-postprocess-script {NO_TF32}"
        tool = f"POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run {model} --trt"
        yield _line(tool, *ranges, script, *_saved(graph, number))


def trtexec_lines(graph: str, model: str, found: Recorded) -> Iterator[str]:
    """One line for each step whose raw inputs were written."""
    for step, inputs in zip(found.steps[graph], found.inputs[graph], strict=True):
        if not found.raw:
            return
        files = {name: raw_file(HERE, graph, step, name) for name in inputs}
        moving = {name: shape for name, (spec, shape) in inputs.items() if _is_dynamic(spec)}
        shapes = ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in moving.items())
        yield _line(
            f"trtexec --onnx={model} --dynamicPlugins={PLUGINS}",
            "--stronglyTyped --noTF32",
            f"--shapes={shapes}",
            "--loadInputs=" + shlex.quote(",".join(f"{name}:{file}" for name, file in files.items())),
            f"--exportOutput={graph}.{step.name.replace(' ', '_')}.json",
        )


def _saved(graph: str, number: int | None = None) -> list[str]:
    """Options for the saved files: of every step, or of one."""
    kinds = ("inputs", "outputs")
    paths = [HERE / graph / kind if number is None else file_of(HERE, graph, kind, number) for kind in kinds]
    return [
        *(f"--load-{kind} {path}" for kind, path in zip(kinds, paths, strict=True)),
        f"--compare-func-script {SCRIPT}",
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


def _line(*parts: str) -> str:
    """A command over several lines."""
    return " \\\n    ".join(parts)
