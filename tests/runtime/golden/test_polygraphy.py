"""The real command `polygraphy` on what `flashnext golden` writes, and on graphs beside their shards."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from flashnext.export.graphs.beside import prefix, write_beside
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.cli.main import main
from flashnext.runtime.golden.folder import file_of
from flashnext.runtime.golden.write import GoldenOptions, Written, write_golden

POLYGRAPHY = str(Path(sys.executable).with_name("polygraphy"))


def lines_of(readme: str, wanted: str) -> list[list[str]]:
    """Command lines of a README that contain a word."""
    blocks = "\n\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    commands = [shlex.split(line.replace("\\\n", " ")) for line in re.split(r"\n\n(?=\w)", blocks.strip())]
    return [words for words in commands if wanted in words]


def polygraphy(*words: str, folder: Path | None = None, **environment: str) -> tuple[int, str]:
    """Exit code and output, run in a folder."""
    merged = {**os.environ, **environment}
    done = subprocess.run([POLYGRAPHY, *words], capture_output=True, text=True, check=False, env=merged, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def changed(folder: Path, written: Written, graph: str, old: str, new: str, number: int) -> list[str]:
    """A command line for a copy of the golden files in which one saved output is another output's array."""
    shutil.copytree(written.folder, folder, ignore=shutil.ignore_patterns("raw", "body"), dirs_exist_ok=True)
    path = file_of(folder, graph, "outputs", number)
    content = json.loads(path.read_text())
    outputs = content["lst"][0][1][0]["outputs"]
    outputs[old] = outputs[new]
    path.write_text(json.dumps(content))
    (line,) = [words for words in lines_of(written.readme, "--onnxrt") if f"{graph}.onnx" in words]
    return line


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "graph", [pytest.param("head", marks=SLOW), "body", pytest.param("mtp", marks=SLOW), "mtp_draft"]
)
def test_every_graph_agrees_with_the_saved_outputs(written: Written, graph: str) -> None:
    """The lines of README.md as they stand: states, sites and outputs of all steps, in ONNX Runtime."""
    lines = lines_of(written.readme, "--onnxrt")
    assert len(lines) == len(written.graphs)
    (line,) = [words for words in lines if f"{graph}.onnx" in words]
    code, output = polygraphy(*line[1:], folder=written.folder)
    assert code == 0, output[-2000:]
    assert "Pass Rate: 100.00%" in output


def test_a_changed_output_fails_and_its_module_is_named(written: Written, tmp_path: Path) -> None:
    site = "mtp.layers.0.mlp_hyper_connection"
    _, *words = changed(tmp_path, written, "mtp_draft", f"{site}.y", "mtp.hyper_connection_mixer.y", 0)
    code, output = polygraphy(*words, folder=tmp_path)
    assert code == 1
    assert f"DIFFERS: {site}.y" in output
    assert "Look at mtp.layers.0.self_attn." in output


def test_a_changed_state_fails(written: Written, tmp_path: Path) -> None:
    keys, values = (f"mtp.layers.0.{kind}_state_out" for kind in ("key", "value"))
    _, *words = changed(tmp_path, written, "mtp_draft", keys, values, 0)
    code, output = polygraphy(*words, folder=tmp_path)
    assert code == 1
    assert f"DIFFERS: {keys}" in output


def test_inspect_reads_graphs_and_arrays(written: Written) -> None:
    code, output = polygraphy("inspect", "model", str(written.graphs["body"]["plugin"]))
    assert code == 0
    assert "GatedDeltaNet" not in output or "flashnext" in output
    assert "ngram_rows.1" in output
    code, output = polygraphy("inspect", "data", str(file_of(written.folder, "head", "inputs", 0)))
    assert code == 0
    assert "token_ids" in output


def test_beside_form(random_bundle: Path, random_checkpoint: Path, tmp_path: Path) -> None:
    """`export --beside` writes the bundle's own graphs, with weights as inputs: they can be inspected by name."""
    checkpoint = Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))
    manifest = Manifest.read(random_bundle)
    place = dataclasses.replace(manifest.checkpoint, common_parent=str(checkpoint))
    for path in write_beside(random_bundle, dataclasses.replace(manifest, checkpoint=place)):
        code, output = polygraphy("inspect", "model", str(path))
        assert code == 0
        assert "lm_head.weight" in output or "head.onnx" in path.name


@pytest.fixture
def own_bundle(random_bundle: Path, random_checkpoint: Path, tmp_path: Path) -> Path:
    """A bundle whose checkpoint, `checkpoint` beside it, may be written to."""
    manifest = Manifest.read(random_bundle)
    checkpoint = Path(shutil.copytree(random_checkpoint, tmp_path / "checkpoint"))
    bundle = Path(shutil.copytree(random_bundle, tmp_path / "bundle"))
    moved = dataclasses.replace(manifest.checkpoint, path=str(checkpoint), common_parent=str(checkpoint))
    dataclasses.replace(manifest, checkpoint=moved).write(bundle)
    return bundle


def test_graphs_beside_the_checkpoint(own_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --copy-weights nothing is copied: the graphs point into the shards, and lie next to them.

    Carried elsewhere, both are found again by the one line that names the checkpoint.
    """
    checkpoint = tmp_path / "checkpoint"
    assert main(["golden", str(own_bundle), "--out", str(tmp_path / "golden")]) == 0
    readme = capsys.readouterr().out
    start = prefix(tmp_path / "golden")
    assert re.fullmatch(r"golden-[0-9a-f]{8}\.", start)
    assert {f.name for f in checkpoint.glob("*.onnx")} == {
        f"{start}{graph}{form}.onnx" for graph in Manifest.read(own_bundle).graphs for form in ("", ".plugin", ".rtx")
    }
    assert list((tmp_path / "golden").rglob("*.safetensors")) == []
    assert readme.count(str(tmp_path)) == readme.count(f"CHECKPOINT={checkpoint} ") == 1

    away = tmp_path / "carried away"
    away.mkdir()
    checkpoint.rename(away / "weights")
    (tmp_path / "golden").rename(away / "golden")
    line = re.search(
        rf"^polygraphy .*{re.escape(start)}mtp_draft\.onnx --onnxrt(.|\n)*?(?=\n\n|```)", readme, re.MULTILINE
    )
    assert line is not None
    script = f"set -eu\nCHECKPOINT={shlex.quote(str(away / 'weights'))}\n{line[0]}"
    path = f"{Path(POLYGRAPHY).parent}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-c", script], cwd=away / "golden", env={**os.environ, "PATH": path}, check=False)
    assert done.returncode == 0


def test_plugin_graphs_have_plugin_nodes_and_their_weights_inside(written: Written) -> None:
    for forms in written.graphs.values():
        portable, plugin = (onnx.load(forms[form], load_external_data=False) for form in ("portable", "plugin"))
        assert [n.op_type for n in plugin.graph.node if any(a.name == "plugin_version" for a in n.attribute)]
        assert not plugin.functions
        assert portable.functions
        for model in (portable, plugin):
            assert not any(value.name.endswith((".weight", "_proj")) for value in model.graph.input)


def test_weights_as_inputs(random_bundle: Path, random_checkpoint: Path, tmp_path: Path) -> None:
    """As engines take them: BF16 experts travel as tensors, which ONNX Runtime cannot take from Polygraphy."""
    before = set(random_checkpoint.iterdir())
    try:
        made = write_golden(random_bundle, tmp_path / "golden", GoldenOptions(weights_as_inputs=True))
        model = onnx.load(made.graphs["mtp"]["plugin"], load_external_data=False)
        assert {"embed_tokens.weight", "lm_head.weight"} <= {value.name for value in model.graph.input}
        code, output = polygraphy("inspect", "data", str(file_of(tmp_path / "golden", "mtp", "inputs", 0)))
        assert code == 0
        assert "lm_head.weight" in output
    finally:
        for file in set(random_checkpoint.iterdir()) - before:
            file.unlink()


# --- TensorRT: what can be shown without a GPU ----------------------------------------------------


def test_lines_for_tensorrt_are_understood(written: Written, tmp_path: Path) -> None:
    """Polygraphy makes a script of a line, without TensorRT: options and shapes are read, nothing is run."""
    lines = lines_of(written.readme, "--trt")
    plain = [words for words in lines if words[0] == "polygraphy"]
    assert len(plain) == len(written.graphs)
    for number, (_, *words) in enumerate(plain):
        code, output = polygraphy(*words, "--gen-script", str(tmp_path / f"{number}.py"), folder=written.folder)
        assert code == 0, output
    text = (tmp_path / "1.py").read_text()
    assert ".add('logit_rows', min=[2], opt=[2], max=[48])" in text
    assert "strongly_typed=True" in text
    assert "key_state" not in text


def test_lines_for_trtexec_name_files_of_the_right_sizes(written: Written) -> None:
    """trtexec reads as many bytes as a shape has: shapes that no step changes are the graph's."""
    block = written.readme.split("## trtexec")[1]
    (first, *_) = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("trtexec")]
    words = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(first)[1:] if "=" in word)
    model = onnx.load(written.folder / words["onnx"], load_external_data=False)
    shapes = dict(part.split(":") for part in words["shapes"].split(","))
    files = dict(part.split(":", 1) for part in words["loadInputs"].split(","))
    assert set(files) == {value.name for value in model.graph.input}
    for value in model.graph.input:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        sizes = [int(n) for n in shapes[value.name].split("x")] if value.name in shapes else dims
        assert all(fixed in (0, size) for fixed, size in zip(dims, sizes, strict=True))
        assert (written.folder / files[value.name]).stat().st_size == math.prod(sizes) * 4


@pytest.fixture
def rtx_by_its_name(tmp_path: Path) -> dict[str, str]:
    """`tensorrt_rtx`, as the package of that name gives it; the wheels have the bindings only."""
    pytest.importorskip("tensorrt_rtx_bindings")
    (tmp_path / "alias/tensorrt_rtx").mkdir(parents=True)
    text = "from tensorrt_rtx_bindings import *\nfrom tensorrt_rtx_bindings import __version__\n"
    (tmp_path / "alias/tensorrt_rtx/__init__.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path / "alias"), "POLYGRAPHY_USE_TENSORRT_RTX": "1"}


def test_tensorrt_for_rtx_builds_the_graph(written: Written, tmp_path: Path, rtx_by_its_name: dict[str, str]) -> None:
    """`polygraphy convert` with the shapes and the script of the README's line, without a GPU; TF32 is off."""
    lines = [words for words in lines_of(written.readme, "--trt") if words[0] == "POLYGRAPHY_USE_TENSORRT_RTX=1"]
    assert len(lines) == 3 * 3 + 1
    words = next(words for words in lines if "head.rtx.onnx" in words)[3:]
    end = words.index("--load-inputs")
    plan = tmp_path / "head.plan"
    options = [word for word in words[:end] if word != "--trt"]
    wanted = ["--convert-to", "trt", "--compute-capabilities", "12.0", "-o", str(plan)]
    code, output = polygraphy("convert", *options, *wanted, folder=written.folder, **rtx_by_its_name)
    assert code == 0, output[-2000:]
    assert "TF32" not in output
    assert plan.stat().st_size > 0
