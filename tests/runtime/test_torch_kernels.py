"""The `torch` engine on the kernels (the host execution of their source) against the engine on the reference ops.

A prefill, a verification step whose drafts are partly rejected, the step after it, and a decode step, of ragged rows,
in every format of expert weights, with the draft layer's graphs. Figures are in standard deviations of the logits.

In float the two have to agree. In BF16 both are compared with the reference in float: long steps round their operands
to BF16 where the reference ops do not, and now and then a choice of experts or blocks that is nearly a tie falls
otherwise, in either of them, which moves all logits of a row. So the typical row says whether the kernels are right,
not the worst.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.errors import EngineError, PluginError
from flashnext.export.graphs.bundle import ExportOptions, describe, with_kv_cache, with_residual
from flashnext.export.ops.torch_ops import call, implemented_by
from flashnext.plugins.kernel_library import KernelError
from flashnext.runtime.engines import open_engine
from flashnext.runtime.engines.torch_engine import TorchEngine, on_device
from flashnext.runtime.engines.torch_kernels import KernelOps, Workspace
from flashnext.runtime.model_runner import ModelRunner, StepBatch
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights

SIZES = {"num_hidden_layers": 3, "full_attention_interval": 3}
WINDOW = 4
TOLERANCE = 2e-5
TYPICAL_BF16 = 5e-2
"""Three quarters of the rows are within it."""
WORSE_THAN_REFERENCE = 1.5
"""How much farther from the float reference the median row of the kernels may be than that of the reference in BF16."""
STEPS = (
    # past_len, accepted, new_len of each row, and the tokens of the step
    ((0, 0), (0, 0), (36, 9), 36),
    ((36, 9), (0, 0), (4, 3), WINDOW),
    ((38, 12), (2, 3), (1, 2), 2),
    ((39, 12), (1, 0), (1, 1), 1),
)


def runner(checkpoint: Checkpoint, dtype: str, ops: str, residual: str = "plain", cache: str = "auto") -> ModelRunner:
    options = ExportOptions(
        window=WINDOW, capacity=64, slots=3, dtype=dtype, residual_form=residual, kv_cache_dtype=cache
    )
    options = with_kv_cache(with_residual(options, checkpoint), checkpoint)
    manifest = describe(checkpoint, checkpoint.config, options)
    states = allocate_states(manifest)
    bound = {**load_weights(manifest, checkpoint), **states}
    engines = {name: TorchEngine(name, manifest, checkpoint, None, ops) for name in manifest.graphs}
    for engine in engines.values():
        engine.bind(bound)
    sources = {n.input: HostRows.open(n, checkpoint, manifest.dtype) for n in manifest.ngrams}
    return ModelRunner(manifest, engines, states, sources)


def outputs(runner: ModelRunner) -> list[np.ndarray]:
    """Logits of each row's last valid token in every step, of the body and of the draft layer."""
    random = np.random.default_rng(0)
    slots, found = np.array([2, 0], np.int32), []
    for past, accepted, new, steps in STEPS:
        tokens = random.integers(0, 496, (2, steps)).astype(np.int32)
        context = random.integers(0, 496, (2, 2))
        lengths = [np.array(column, np.int32) for column in (past, accepted, new)]
        rows = (np.arange(2) * steps + lengths[2] - 1).astype(np.int32)
        out = runner.step(StepBatch(tokens, slots, *lengths, context, rows))
        drafts = runner.mtp_step(tokens, out.hidden, slots, lengths[0], lengths[2], rows)
        found += [out.logits, drafts[0]]
    length = lengths[0] + lengths[2]
    hidden = np.ascontiguousarray(drafts[1][:, -1:])
    first = np.arange(2, dtype=np.int32)
    found.append(runner.mtp_draft(tokens[:, :1], hidden, slots, length, first * 0 + 1, drafts[2], length, first)[0])
    return found


def row_errors(got: list[np.ndarray], want: list[np.ndarray]) -> list[float]:
    """The largest error of each row of logits."""
    rows = (
        (g, w, batch.std()) for many, batch in zip(got, want, strict=True) for g, w in zip(many, batch, strict=True)
    )
    return [float(np.abs(g - w).max() / size) for g, w, size in rows]


def opened(folder: Path, experts: str | None) -> Checkpoint:
    return Checkpoint.open(write_random_checkpoint(folder / "checkpoint", SIZES, quantization=experts, tokenizer=False))


@pytest.mark.parametrize(
    ("experts", "residual", "cache"),
    [(None, "plain", "auto"), (None, "fp8-dynamic", "auto"), ("nvfp4", "plain", "auto"), (None, "plain", "fp8")],
)
def test_kernels_give_the_reference_s_logits(tmp_path: Path, experts: str | None, residual: str, cache: str) -> None:
    checkpoint = opened(tmp_path, experts)
    want, got = (outputs(runner(checkpoint, "float32", ops, residual, cache)) for ops in ("reference", "host"))
    errors = row_errors(got, want)
    assert 0 < max(errors) <= TOLERANCE, errors


@pytest.mark.parametrize("experts", [None, "fp8"])
def test_kernels_in_bf16_are_as_near_to_float_as_the_reference_is(tmp_path: Path, experts: str | None) -> None:
    checkpoint = opened(tmp_path, experts)
    exact = outputs(runner(checkpoint, "float32", "reference"))
    reference, kernels = (
        row_errors(outputs(runner(checkpoint, "bfloat16", ops)), exact) for ops in ("reference", "host")
    )
    assert 0 < np.quantile(kernels, 0.75) <= TYPICAL_BF16, kernels
    assert np.median(kernels) <= WORSE_THAN_REFERENCE * np.median(reference), (kernels, reference)


# --- the ops by themselves --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ops() -> KernelOps:
    return KernelOps.on_host()


def residual(hidden: int = 16) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 2, hidden), (1, 2, hidden), (1, 2, 2), (2 * hidden,), (8, 2 * hidden), (2 * hidden, 8)]
    return [torch.randn(shape, generator=g) for shape in (*shapes, (2, 2 * hidden))]


def test_inputs_may_lie_anywhere(ops: KernelOps) -> None:
    """Neither contiguous nor aligned: copied; the caller's tensors stay."""
    inputs = residual()
    want = call("GatedResidual", "pending", *inputs, branches=2, eps=1e-6)
    inputs[4] = inputs[4].T.contiguous().T
    odd = torch.empty(inputs[1].numel() + 1)[1:].view(inputs[1].shape)
    inputs[1] = odd.copy_(inputs[1])
    with implemented_by(ops.run):
        got = call("GatedResidual", "pending", *inputs, branches=2, eps=1e-6)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    again = call("GatedResidual", "pending", *inputs, branches=2, eps=1e-6)
    assert torch.equal(again[0], want[0]), "outside of the block the reference is back"


@pytest.mark.parametrize("scales", ["static", "dynamic"])
def test_a_state_in_fp8(ops: KernelOps, scales: str) -> None:
    inputs = residual()
    inputs[0] = inputs[0].to(torch.float8_e4m3fn)
    static = [torch.tensor([0.5, 1.0]), torch.tensor([0.01, 0.02])]
    inputs += static if scales == "static" else [torch.rand(1, 2, 2) + 0.1]
    want = call("GatedResidual", f"pending_fp8_{scales}", *inputs, branches=2, eps=1e-6)
    with implemented_by(ops.run):
        got = call("GatedResidual", f"pending_fp8_{scales}", *inputs, branches=2, eps=1e-6)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), w.float())


def test_sizes_without_a_kernel_are_named(ops: KernelOps) -> None:
    with implemented_by(ops.run), pytest.raises(PluginError, match="hidden must be a multiple of 8"):
        call("GatedResidual", "pending", *residual(12), branches=2, eps=1e-6)


def test_counters_are_made_once_and_again_after_a_failure(ops: KernelOps, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    large = ops._zeros("op", [2, 8], cpu)
    assert ops._zeros("op", [3, 4], cpu).data_ptr() == large.data_ptr()
    large.fill_(7)

    def fail(*_: object) -> None:
        raise KernelError("failed half-way")

    monkeypatch.setattr(ops, "_launch", fail)
    with pytest.raises(KernelError):
        ops.run("GatedResidual", "pending", residual(), {"branches": 2, "eps": 1e-6})
    assert not ops._zeros("op", [2, 8], cpu).any()


def test_workspace_is_one_buffer_that_grows() -> None:
    workspace = Workspace(torch.device("cpu"))
    first = workspace(100)
    assert workspace(60).data_ptr() == first.data_ptr()
    assert len(workspace(1000)) == 1000
    assert workspace(0).numel() == 0


# --- where it computes ------------------------------------------------------------------------------


def test_graphs_share_an_array_s_copy_on_a_device() -> None:
    array, other = np.zeros(5, np.float32), np.zeros(5, np.float32)
    meta = torch.device("meta")
    first = on_device(array, meta)
    assert on_device(array, meta) is first
    assert on_device(other, meta) is not first
    assert on_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_device_without_a_gpu_is_refused() -> None:
    with pytest.raises(EngineError, match="PyTorch sees no GPU"):
        KernelOps.on_device()


def test_unknown_ops_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no engine 'torch:gpu'; choose one of .*torch:host"):
        open_engine("torch:gpu", "body", tmp_path, None, None)  # type: ignore[arg-type]
