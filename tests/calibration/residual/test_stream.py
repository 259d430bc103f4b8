"""The watched model is the model: same logits, same names, every event consistent with the op's formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flashnext.calibration.residual.storage import Fp8Storage
from flashnext.calibration.residual.stream import Listener, Read, ResidualModel, Store
from flashnext.export.checkpoint.random_checkpoint import write_random_checkpoint
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.graphs.bundle import describe
from flashnext.export.graphs.io import BuildOptions
from flashnext.export.ops.reference.gated_residual import write
from flashnext.export.ops.reference.residual_store import E4M3
from flashnext.export.residual_scales import ResidualStorage, store_names
from flashnext.runtime.engines.torch_engine import TorchEngine
from flashnext.runtime.model_runner import ModelRunner, StepBatch
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights


class Recorder(Listener):
    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.reads: list[Read] = []

    def read(self, event: Read) -> None:
        self.reads.append(event)

    def store(self, event: Store) -> None:
        self.stores.append(event)


@pytest.fixture(scope="module")
def recorded(model: ResidualModel, tokens: np.ndarray) -> tuple[Recorder, np.ndarray]:
    recorder = Recorder()
    return recorder, model.run(tokens, recorder, drafts=True)


def exported_logits(checkpoint: Checkpoint, tokens: np.ndarray, residual: ResidualStorage) -> np.ndarray:
    """Logits [B, S, V] of the modules that the graphs are traced from."""
    rows, length = len(tokens), tokens.shape[1] - 1
    options = BuildOptions(capacity=length, slots=rows, residual=residual)
    manifest = describe(checkpoint, checkpoint.config, options)
    states = allocate_states(manifest)
    engines = {name: TorchEngine(name, manifest, checkpoint, None) for name in ("head", "body")}
    for engine in engines.values():
        engine.bind({**load_weights(manifest, checkpoint), **states})
    sources = {n.input: HostRows.open(n, checkpoint, "float32") for n in manifest.ngrams}
    runner = ModelRunner(manifest, engines, states, sources)
    zeros = np.zeros(rows, np.int32)
    out = runner.step(
        StepBatch(
            token_ids=tokens[:, :-1],
            slots=np.arange(rows, dtype=np.int32),
            past_len=zeros,
            accepted=zeros,
            new_len=zeros + length,
            context=np.full((rows, 2), checkpoint.config.ngram_eos),
            logit_rows=np.arange(rows * length, dtype=np.int32),
        )
    )
    runner.close()
    return out.logits.reshape(rows, length, -1)


def test_logits_are_those_of_the_exported_modules(
    watched_checkpoint: Checkpoint, recorded: tuple[Recorder, np.ndarray], tokens: np.ndarray
) -> None:
    assert np.array_equal(recorded[1], exported_logits(watched_checkpoint, tokens, ResidualStorage()))


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_the_simulated_storage_is_that_of_the_exported_modules(
    model: ResidualModel, watched_checkpoint: Checkpoint, tokens: np.ndarray, mode: str
) -> None:
    """What is measured here is what an FP8 export computes."""
    names = store_names(watched_checkpoint.config)
    scales = dict.fromkeys(names, (0.003, 0.01, 0.02, 0.05)) if mode == "static" else None
    found = model.run(tokens, storage=Fp8Storage(E4M3, names, scales))
    expected = exported_logits(watched_checkpoint, tokens, ResidualStorage(mode, scales or {}))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - model.run(tokens)).max() > 0.01


def test_stores_and_reads_come_in_the_models_order(
    recorded: tuple[Recorder, np.ndarray], watched_checkpoint: Checkpoint
) -> None:
    names = store_names(watched_checkpoint.config)
    assert tuple(s.name for s in recorded[0].stores) == names
    blocks = [f"layers.{i}.{kind}" for i in range(8) for kind in ("mixer", "mlp")]
    drafts = [f"mtp.layers.0.{kind}" for kind in ("input", "mixer", "mlp", "final", "input")]
    assert [r.site for r in recorded[0].reads] == [*blocks, "final", *drafts]


def test_events_obey_the_formulas(recorded: tuple[Recorder, np.ndarray]) -> None:
    for event in recorded[0].stores:
        if event.y is not None and event.s is not None and event.before is not None:
            added = 0 if event.injection is None else event.injection
            torch.testing.assert_close(event.after, write(event.before, event.y, event.s) + added)
        else:
            assert event.before is None
    assert sum(e.injection is not None for e in recorded[0].stores) == 1
    for event in recorded[0].reads:
        torch.testing.assert_close(event.reader(event.r), event.x)
        assert event.s is None or (event.s.min() > 0 and event.s.max() < 2)


def test_storage_is_what_the_next_op_gets(model: ResidualModel, tokens: np.ndarray) -> None:
    """Zeros come back from one store: the next write adds to nothing, while its own read saw the true value."""
    recorder = Recorder()

    def forget(store: str, r: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.tolist() == [list(range(r.shape[1]))] * len(r)
        return torch.zeros_like(r) if store == "layers.2.mixer" else r

    model.run(tokens, recorder, forget)
    by_name = {s.name: s for s in recorder.stores}
    following = by_name["layers.2.mlp"]
    assert following.before is not None
    assert not following.before.any()
    read = next(r for r in recorder.reads if r.site == "layers.2.mlp")
    assert read.r is by_name["layers.2.mixer"].after


def test_greedy_text_is_what_whole_windows_predict(model: ResidualModel, tokens: np.ndarray) -> None:
    prompts = tokens[:, :8]
    written = model.greedy(prompts, 12)
    whole = np.concatenate([prompts, written], axis=1)
    predicted = model.run(whole)[:, 7:].argmax(-1)
    assert np.array_equal(predicted, written)


@pytest.mark.parametrize("options", [{"quantization": "nvfp4", "mtp": False}, {"config": {"ple_layer_ids": [1]}}])
def test_other_checkpoints(tmp_path: Path, options: dict[str, object]) -> None:
    """Quantized experts without a draft layer; an injection before the first layer (there is no head then)."""
    checkpoint = Checkpoint.open(write_random_checkpoint(tmp_path / "checkpoint", **options))  # type: ignore[arg-type]
    recorder = Recorder()
    model = ResidualModel.open(checkpoint, 1, 8)
    model.run(np.arange(9, dtype=np.int32)[None], recorder, logits=False, drafts=True)
    assert tuple(s.name for s in recorder.stores) == store_names(checkpoint.config)
    model.close()
