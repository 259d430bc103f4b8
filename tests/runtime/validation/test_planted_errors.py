"""One fault is planted in a copy, and `validate` finds it and names the block: on the trained model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from validation.planting import (
    Change,
    changed_checkpoint,
    changed_graph,
    doubled,
    exchanged_weights,
    one_weight,
    tenth_more,
)

from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.runtime.cli.main import main
from flashnext.runtime.golden.write import GoldenOptions, write_golden
from flashnext.runtime.validation.validator import validate

POLYGRAPHY = str(Path(sys.executable).with_name("polygraphy"))


@pytest.fixture(scope="module")
def golden(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved outputs of the sound model, by layer."""
    folder = tmp_path_factory.mktemp("sound") / "golden"
    write_golden(small_bundle, folder, GoldenOptions(per_layer=True, copy_weights=True))
    return folder


def test_sound_model_agrees_everywhere(small_bundle: Path, golden: Path) -> None:
    report = validate(small_bundle, ["onnxruntime", "torch:reference"], golden=golden, per_layer=True)
    assert report.passed
    assert report.faults == []
    assert len(report.of_sites()) > 500
    assert report.reference == "golden"


PLANTED = [
    ("layers.0.linear_attn.in_proj_qkv.weight", one_weight, "layers.0.linear_attn"),
    ("layers.1.ple.value_proj.weight", tenth_more, "layers.1.ple"),
    ("layers.3.self_attn.o_proj.weight", one_weight, "layers.3.self_attn"),
    ("layers.4.mlp.shared_expert.down_proj.weight", one_weight, "layers.4.mlp"),
    ("layers.5.mlp_hyper_connection.hc_norm.weight", tenth_more, "layers.5.mlp_hyper_connection"),
    ("hyper_connection_mixer.hc_norm.weight", tenth_more, "hyper_connection_mixer"),
    ("mtp.fc_hidden.weight", one_weight, "mtp.fc_hidden or mtp.fc_embedding or the norms before them"),
]


CASES = [
    pytest.param(*case, id=case[0], marks=() if number % 2 else pytest.mark.slow) for number, case in enumerate(PLANTED)
]


@pytest.mark.parametrize(("tensor", "change", "suspect"), CASES)
def test_changed_weight_of_a_checkpoint(
    small_bundle: Path, golden: Path, tmp_path: Path, tensor: str, change: Change, suspect: str
) -> None:
    """Against what the sound checkpoint gave."""
    bundle = changed_checkpoint(small_bundle, tmp_path, tensor, change)
    report = validate(bundle, golden=golden, per_layer=True)
    assert not report.passed
    (fault,) = report.faults
    assert fault.suspect == suspect
    assert "another checkpoint" in report.notes[0]


def test_wrong_weights_of_a_graph_are_named_on_the_command_line(
    small_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against PyTorch, which reads the checkpoint by names: layers 2 and 6 have each other's projection."""
    names = (f"layers.{layer}.linear_attn.out_proj.weight" for layer in (2, 6))
    bundle = changed_graph(small_bundle, tmp_path / "bundle", "body", exchanged_weights(*names))
    page = tmp_path / "out.html"
    assert main(["validate", str(bundle), "--per-layer", "--json", "--report", str(page)]) == 1
    captured = capsys.readouterr()
    (fault,) = json.loads(captured.out)["faults"]
    assert fault["suspect"] == "layers.2.linear_attn"
    assert "Look at layers.2.linear_attn." in captured.err
    assert "Look at layers.2.linear_attn." in page.read_text()


def test_without_layers_the_graph_is_named(small_bundle: Path, golden: Path, tmp_path: Path) -> None:
    bundle = changed_checkpoint(small_bundle, tmp_path, "layers.4.mlp.gate.weight", tenth_more)
    (fault,) = validate(bundle, golden=golden).faults
    assert fault.row.graph == "body"
    assert "--per-layer" in fault.suspect


@pytest.mark.slow
def test_wrong_scale_of_quantized_experts(tmp_path: Path) -> None:
    """Experts in block FP8, an expert at a time: their weights are put together in a file beside the graphs."""
    sound = tmp_path / "sound"
    sizes = {"num_hidden_layers": 4}
    write_random_checkpoint(sound / "checkpoint", sizes, quantization="fp8", tokenizer=False)
    export_bundle(sound / "checkpoint", sound / "bundle", ExportOptions(capacity=64, slots=2))
    golden = tmp_path / "golden"
    written = write_golden(sound / "bundle", golden, GoldenOptions(per_layer=True, copy_weights=True))
    assert (golden / "weights.bin").is_file()
    for graph in written.graphs:
        words = [str(written.graphs[graph]["portable"]), "--onnxrt"]
        words += ["--load-inputs", str(golden / graph / "inputs"), "--load-outputs", str(golden / graph / "outputs")]
        words += ["--compare-func-script", str(golden / "compare.py")]
        assert subprocess.run([POLYGRAPHY, "run", *words], capture_output=True, check=False).returncode == 0
    tensor = "layers.2.mlp.experts.1.down_proj.weight_scale_inv"
    bundle = changed_checkpoint(sound / "bundle", tmp_path / "changed", tensor, doubled)
    (fault,) = validate(bundle, golden=golden, per_layer=True).faults
    assert fault.suspect == "layers.2.mlp"
