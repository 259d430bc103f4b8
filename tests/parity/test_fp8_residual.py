"""A residual in FP8 end to end: ONNX Runtime, PyTorch and the kernels store the same codes.

Not bit by bit over a whole model: where a value lies on the edge between two codes, another order of summation decides,
and a code that differs changes what every later store of its token, and of all tokens after it, is given. So what has
to be rare are codes that differ by themselves (`residual_stores.Difference`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer

from flashnext.export.checkpoint.identity import identity
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.bundle import ExportOptions, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.export.ops import schema
from flashnext.export.ops.reference import REFERENCES
from flashnext.export.residual_scales import CalibrationText, ResidualScales, store_names
from flashnext.runtime.validation.validator import validate

from .configs import BY_NAME
from .references import checkpoint_of, oracle_of
from .residual_stores import RESIDUAL_OPS, Run, difference, largest_scales, run_text

ROOT = Path(__file__).parents[2]
ONE_STEP = 4096
"""A chunk that holds any text."""
FEW = 3


@dataclass
class Model:
    """A checkpoint, a text, and a bundle for each mode."""

    checkpoint: Path
    tokens: list[int]
    folder: Path

    def bundle(self, mode: str) -> Path:
        return self.folder / mode


def exported(checkpoint: Path, tokens: Sequence[int], folder: Path, patch: pytest.MonkeyPatch) -> Model:
    """Bundles with dynamic scales, and with static ones: the largest of the dynamic ones on this text."""
    model = Model(checkpoint, list(tokens), folder)
    sizes: dict[str, Any] = {"capacity": 512, "slots": 1}
    export_bundle(checkpoint, model.bundle("dynamic"), ExportOptions(**sizes, residual_form="fp8-dynamic"))
    config, scales = ModelConfig.from_folder(checkpoint), dict[str, np.ndarray]()
    with largest_scales(scales, store_names(config), patch):
        run_text(model.bundle("dynamic"), "torch:reference", tokens, ONE_STEP, patch)
    text = CalibrationText("0" * 64, 1, len(tokens), 0)
    values = {name: tuple(map(float, scale)) for name, scale in scales.items()}
    ResidualScales(identity(checkpoint), "max", "static", "e4m3", text, values).write(folder / "scales.json")
    static = ExportOptions(**sizes, residual_form="fp8", scales=folder / "scales.json")
    export_bundle(checkpoint, model.bundle("static"), static)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    case = BY_NAME["budget_above_length"]
    with pytest.MonkeyPatch.context() as patch:
        tokens = oracle_of(case).text(60, seed=3)
        return exported(checkpoint_of(case), tokens, tmp_path_factory.mktemp("tiny"), patch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Model:
    small = ROOT / "models/small"
    text = (small / "README.md").read_text(encoding="utf-8")
    tokens = Tokenizer.from_file(str(small / "tokenizer.json")).encode(text).ids[:400]
    with pytest.MonkeyPatch.context() as patch:
        return exported(small, tokens, tmp_path_factory.mktemp("trained"), patch)


MODELS = pytest.mark.parametrize("name", ["tiny", pytest.param("trained", marks=pytest.mark.slow)])
MODES = pytest.mark.parametrize("mode", ["static", "dynamic"])


def deviation(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Largest and mean difference, in standard deviations of what is expected."""
    error = np.abs(found.astype(np.float64) - expected) / expected.std()
    return float(error.max()), float(error.mean())


def compare(first: Run, second: Run, what: str) -> None:
    """Codes that differ by themselves: at most 1e-4 of them, by one step. Logits: much nearer than other texts'.

    A single one early in a short text leaves few codes behind it that nothing has touched, so `FEW` may differ anyway.
    """
    found, (largest, mean) = difference(first, second), deviation(second.logits, first.logits)
    print(
        f"{what}: {found.direct_differing} of {found.direct:,} codes differ by themselves ({found.direct_share:.1e}), "
        f"by {found.largest_step} step; with what follows from it {found.share:.1e}; "
        f"logits {largest:.1e} at most, {mean:.1e} in the mean"
    )
    assert found.direct_differing <= max(FEW, 1e-4 * found.direct)
    assert found.largest_step <= 1
    assert mean < 0.05
    assert deviation(second.draft_logits, first.draft_logits)[1] < 0.15


@MODES
@MODELS
def test_engines_store_the_same_codes(
    name: str, mode: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And, with static scales, the same text in chunks of 9 tokens, in either engine."""
    model: Model = request.getfixturevalue(name)
    bundle = model.bundle(mode)
    whole = {
        engine: run_text(bundle, engine, model.tokens, ONE_STEP, monkeypatch)
        for engine in ("torch:reference", "onnxruntime")
    }
    compare(whole["torch:reference"], whole["onnxruntime"], f"{name}, {mode}, ONNX Runtime")
    for engine, run in whole.items() if mode == "static" or name == "trained" else ():
        pieces = run_text(bundle, engine, model.tokens, 9, monkeypatch)
        compare(run, pieces, f"{name}, {mode}, chunks of 9 in {engine}")


@MODES
def test_kernels_store_the_same_codes_for_equal_inputs(tiny: Model, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op of the model on what PyTorch gives it: GatedResidual's codes bit for bit, an injection's but for ties."""
    from flashnext.runtime.engines.torch_kernels import KernelOps

    kernels = KernelOps.on_host()
    counts = {"GatedResidual": [0, 0], "NgramInjection": [0, 0]}

    def both(op: str, form: str, reference: Any) -> Any:
        def run(*inputs: torch.Tensor, **attributes: Any) -> Any:
            copies = [t.clone() for t in inputs]
            out, found = reference(*inputs, **attributes), kernels.run(op, form, copies, attributes)
            if not form.startswith("settled"):
                codes, wanted = found[0].view(torch.uint8), out[0].view(torch.uint8)
                counts[op][0] += int((codes != wanted).sum())
                counts[op][1] += codes.numel()
            return out

        return run

    for op in counts:
        for form, reference in REFERENCES[op].items():
            if f"_fp8_{mode}" in form:
                monkeypatch.setitem(REFERENCES[op], form, both(op, form, reference))
    run_text(tiny.bundle(mode), "torch:reference", tiny.tokens[:40], ONE_STEP, monkeypatch)
    print(f"{mode}: kernels' codes that differ, of all: {counts}")
    assert counts["GatedResidual"][0] == 0
    assert counts["GatedResidual"][1] > 0
    assert counts["NgramInjection"][0] <= 1e-3 * counts["NgramInjection"][1]


@MODES
@pytest.mark.slow
def test_validation_judges_by_the_mean(tiny: Model, mode: str) -> None:
    report = validate(tiny.bundle(mode), threads=1)
    assert report.passed
    assert all(row.by_mean for row in report.rows)
    assert {"r", "hidden", "hidden_out"} <= {row.output for row in report.rows}


def test_graphs_hold_the_scales_of_the_file(tiny: Model) -> None:
    """Every store divides by its own scale, and what reads it next multiplies by the same."""
    bundle = tiny.bundle("static")
    manifest = Manifest.read(bundle)
    expected, found, held = list(manifest.residual_scales.values()), list[Any](), None
    for graph in ("head", "body", "mtp"):
        model = onnx.load(bundle / manifest.graphs[graph].file, load_external_data=False)
        scales_there = [i for i in model.graph.initializer if i.name.endswith("store.scale")]
        values = {i.name: tuple(onnx.numpy_helper.to_array(i).tolist()) for i in scales_there}
        for node in model.graph.node:
            if node.op_type in RESIDUAL_OPS:
                form = next(a.s.decode() for a in node.attribute if a.name == "form")
                ports = [port.name for port in schema.op(node.op_type).form(form).inputs]
                scales = {port: values[name] for port, name in zip(ports, node.input, strict=True) if "scale" in port}
                assert scales.get("r_scale", held) == held
                if "r_out_scale" in scales:
                    found.append(held := scales["r_out_scale"])
        held = held if graph == "head" else None
    assert found == expected
