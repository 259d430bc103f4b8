"""The `torch` engine on the kernels (the host execution of their source) against the engine on the reference ops.

A prefill, a verification step whose drafts are partly rejected, the step after it, and a decode step, of ragged rows,
in every format of expert weights, with the draft layer's graphs. In float the logits have to agree (figures are in
standard deviations of the logits); in BF16 every op by itself (`side_by_side.py` says why).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from side_by_side import SideBySide

from flashnext.export.checkpoint import Checkpoint
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.errors import EngineError, PluginError
from flashnext.export.graphs.bundle import ExportOptions, describe, with_kv_cache, with_residual
from flashnext.export.ops import schema
from flashnext.export.ops.torch_ops import Implementation, call, implemented_by, reference
from flashnext.plugins.kernel_library import KernelError
from flashnext.runtime.engines import open_engine, torch_kernels
from flashnext.runtime.engines.torch_engine import TorchEngine, on_device
from flashnext.runtime.engines.torch_kernels import KernelOps, Workspace
from flashnext.runtime.model_runner import ModelRunner, StepBatch
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights

SIZES = {"num_hidden_layers": 3, "full_attention_interval": 3}
WINDOW = 4
TOLERANCE = 2e-5
STEPS = (
    # past_len, accepted, new_len of each row, and the tokens of the step
    ((0, 0), (0, 0), (36, 9), 36),
    ((36, 9), (0, 0), (4, 3), WINDOW),
    ((38, 12), (2, 3), (1, 2), 2),
    ((39, 12), (1, 0), (1, 1), 1),
)


def runner(
    checkpoint: Checkpoint,
    dtype: str,
    ops: str,
    residual: str = "plain",
    cache: str = "auto",
    implementation: Implementation | None = None,
) -> ModelRunner:
    """`implementation` takes the place of what `ops` stands for."""
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
        engine._implementation = implementation or engine._implementation
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


@pytest.mark.parametrize(("experts", "cache"), [(None, "auto"), ("fp8", "fp8")])
def test_every_op_in_bf16_does_what_the_reference_does(tmp_path: Path, experts: str | None, cache: str) -> None:
    judge = SideBySide(KernelOps.on_host().run)
    outputs(runner(opened(tmp_path, experts), "bfloat16", "host", cache=cache, implementation=judge))
    layers, draft_layers = 3, 1
    passes = len(STEPS) * (layers + draft_layers) + draft_layers
    assert judge.calls["SparseMoE"] == passes
    assert judge.calls["GatedDeltaNet"] == 2 * len(STEPS)
    assert judge.calls["SparseAttention"] + judge.calls["GatedDeltaNet"] == passes
    assert judge.calls["NgramInjection"] == len(STEPS)
    assert judge.calls["GatedResidual"] == 2 * passes + 2 * len(STEPS) + 1


# --- wrong bindings ---------------------------------------------------------------------------------


Call = tuple[str, str, list[torch.Tensor], dict[str, object]]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every call of an op in the model in BF16, its inputs as they were before it (but for the caches' scales)."""
    found: list[Call] = []

    def record(op: str, form: str, inputs: Sequence[torch.Tensor], attributes: Mapping[str, object]) -> object:
        names = [port.name for port in schema.op(op).form(form).inputs]
        kept = {name: tensor.clone() for name, tensor in zip(names, inputs, strict=True)}
        if "k_scale" in kept:  # they are 1 in this checkpoint
            kept |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}
        found.append((op, form, list(kept.values()), dict(attributes)))
        return reference(op, form, inputs, attributes)

    folder = tmp_path_factory.mktemp("calls")
    outputs(runner(opened(folder, None), "bfloat16", "reference", cache="fp8", implementation=record))
    return found


SAME_MEANING = {("norm_key_weight", "norm_query_weight")}
"""Only the product of these two norms' weights counts."""


def alike(calls: Sequence[Call], op: str) -> set[tuple[str, str]]:
    """Pairs of inputs that no check of shapes or dtypes tells apart; not the integers, which say where memory is."""
    pairs = set()
    for name, form, inputs, _ in calls:
        given = [(p.name, t) for p, t in zip(schema.op(name).form(form).inputs, inputs, strict=True) if name == op]
        for (first, a), (second, b) in itertools.combinations(given, 2):
            if (a.shape, a.dtype) == (b.shape, b.dtype) and a.dtype != torch.int32:
                pairs.add((first, second))
    return pairs - SAME_MEANING


@pytest.mark.parametrize(("op", "pairs"), [("NgramInjection", 3), ("GatedDeltaNet", 2), ("SparseAttention", 5)])
def test_exchanged_inputs_are_noticed(
    ops: KernelOps, calls: list[Call], monkeypatch: pytest.MonkeyPatch, op: str, pairs: int
) -> None:
    found, of_op = alike(calls, op), [call for call in calls if call[0] == op]
    assert len(found) == pairs, found
    judge_all(ops, of_op)
    for first, second in sorted(found):
        other = {first: second, second: first}
        monkeypatch.setattr(torch_kernels, "field_of_port", lambda op, form, port, other=other: other.get(port, port))
        with pytest.raises(AssertionError, match=f"{op} "):
            judge_all(ops, of_op)


def judge_all(ops: KernelOps, calls: Sequence[Call]) -> None:
    judge = SideBySide(ops.run)
    for op, form, inputs, attributes in calls:
        judge(op, form, [tensor.clone() for tensor in inputs], attributes)


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
