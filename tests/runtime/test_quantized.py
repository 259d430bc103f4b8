"""A quantized checkpoint computes the same as its dequantized twin, in every engine, and every scale matters.

Figures are in standard deviations of the twin's logits in PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.dequantized import write_dequantized
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.random_quantized import QUANTIZATIONS
from flashnext.export.graphs.bundle import ExportOptions, describe, export_bundle
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.engines.torch_engine import TorchEngine
from flashnext.runtime.model_runner import ModelRunner, StepBatch
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.ngram_table import NgramTable
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights

SIZES = {"num_hidden_layers": 4, "hidden_size": 144, "moe_intermediate_size": 160, "ple_embed_dim": 256}
OPTIONS = ExportOptions(window=4, capacity=64, slots=2)
PYTORCH, ONNX_RUNTIME, FORGOTTEN = 1e-5, 2e-4, 0.1
ONE = 0x38
"""The E4M3 code of 1."""
Folders = Callable[[str], Path]
Logits = list[np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Each variant's folder (and its twin's, as `<name>-twin`), written once."""
    base = tmp_path_factory.mktemp("quantized")

    def get(name: str) -> Path:
        folder = base / name
        if not folder.exists():
            variant = name.removesuffix("-twin")
            if name == variant:
                write_random_checkpoint(folder, SIZES, quantization=variant, tokenizer=False)
            else:
                write_dequantized(get(variant), folder)
        return folder

    return get


def pytorch(folder: Path, change: Callable[[Manifest, dict[str, Any]], object] = lambda *_: None) -> ModelRunner:
    """The PyTorch model of a checkpoint; `change` may spoil what is bound. No graph is traced for it."""
    checkpoint = Checkpoint.open(folder)
    manifest = describe(checkpoint, checkpoint.config, OPTIONS)
    states = allocate_states(manifest)
    bound = {**load_weights(manifest, checkpoint), **states}
    change(manifest, bound)
    engines = {name: TorchEngine(name, manifest, checkpoint, None) for name in manifest.graphs}
    for engine in engines.values():
        engine.bind(bound)
    sources = {n.input: HostRows.open(n, checkpoint, manifest.dtype) for n in manifest.ngrams}
    return ModelRunner(manifest, engines, states, sources)


def logits(runner: ModelRunner) -> Logits:
    """A ragged prefill and a decode step, of the draft layer too where there is one."""
    random = np.random.default_rng(0)
    slots, start = np.array([1, 0], np.int32), np.zeros(2, np.int32)
    first, second = np.array([20, 17], np.int32), np.ones(2, np.int32)
    rows = np.array([3, 19, 36], np.int32), np.array([0, 1], np.int32)
    out: Logits = []
    for past, new, wanted in ((start, first, rows[0]), (first, second, rows[1])):
        tokens = random.integers(0, 496, (2, new.max())).astype(np.int32)
        context = np.full((2, 2), 496) if past is start else random.integers(0, 496, (2, 2))
        step = runner.step(StepBatch(tokens, slots, past, start, new, context, wanted))
        out.append(step.logits)
        if runner.has_mtp:
            out.append(runner.mtp_step(tokens, step.hidden, slots, past, new, wanted)[0])
    runner.close()
    return out


def distance(got: Logits, want: Logits) -> float:
    return max(float(np.abs(g - w).max() / w.std()) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("variant", QUANTIZATIONS)
def test_pytorch_computes_the_same_as_the_twin(variants: Folders, variant: str) -> None:
    want = logits(pytorch(variants(f"{variant}-twin")))
    assert distance(logits(pytorch(variants(variant))), want) <= PYTORCH


def check_onnx_runtime(checkpoint: Path, twin: Path, bundle: Path) -> None:
    export_bundle(checkpoint, bundle, OPTIONS)
    assert distance(logits(ModelRunner.open(bundle)), logits(pytorch(twin))) <= ONNX_RUNTIME


def test_onnx_runtime_computes_the_same_as_the_twin(tmp_path: Path) -> None:
    """All formats of experts in one graph; the test below has every variant."""
    folder = write_random_checkpoint(tmp_path / "mixed", SIZES, quantization="mixed", tokenizer=False, mtp=False)
    check_onnx_runtime(folder, write_dequantized(folder, tmp_path / "twin"), tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize("variant", QUANTIZATIONS)
def test_onnx_runtime_computes_the_same_as_every_twin(variants: Folders, tmp_path: Path, variant: str) -> None:
    check_onnx_runtime(variants(variant), variants(f"{variant}-twin"), tmp_path / "bundle")


@pytest.mark.slow
def test_a_twin_may_mix_dtypes_of_experts_in_one_graph(variants: Folders, tmp_path: Path) -> None:
    """The twin of "mixed" has a layer in BF16 and others in F32: two kinds of one form."""
    check_onnx_runtime(variants("mixed-twin"), variants("mixed-twin"), tmp_path / "bundle")


# --- forgotten scales ----------------------------

SCALES = [
    "layers.1.mlp.experts.gate_up_scale",
    "layers.1.mlp.experts.gate_up_scale_2",
    "layers.1.mlp.experts.down_scale",
    "layers.1.mlp.experts.down_scale_2",
    "layers.2.mlp.experts.gate_up_scale",
    "layers.2.mlp.experts.down_scale",
    "mtp.layers.0.mlp.experts.down_scale",
]


@pytest.mark.parametrize("name", SCALES)
def test_a_forgotten_scale_shows(variants: Folders, name: str) -> None:
    def forget(_: Manifest, bound: dict[str, Any]) -> None:
        scale = bound[name]
        bound[name] = np.full_like(scale, ONE if scale.dtype == np.uint8 else 1)

    want = logits(pytorch(variants("mixed-twin")))
    assert distance(logits(pytorch(variants("mixed"), forget)), want) > FORGOTTEN


@pytest.mark.parametrize("variant", ["mixed", "nvfp4-all"])
def test_a_forgotten_scale_of_the_table_shows(variants: Folders, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    want = logits(pytorch(variants(f"{variant}-twin")))
    full = NgramTable.__init__

    def forgetful(self: NgramTable, *arguments: Any) -> None:
        names = list(inspect.signature(full).parameters)[1:]
        full(self, **dict(zip(names, arguments, strict=False)) | {"scale": 1.0})

    monkeypatch.setattr(NgramTable, "__init__", forgetful)
    assert distance(logits(pytorch(variants(variant))), want) > FORGOTTEN
