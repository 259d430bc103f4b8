"""Training learns, stages train what they should, and an interrupted run gives the curve of an uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flashnext.calibration.training import train_small
from flashnext.calibration.training.data import Windows, prepare
from flashnext.calibration.training.settings import STAGES, Settings
from flashnext.calibration.training.team import Team
from flashnext.calibration.training.trainer import Trainer
from flashnext.calibration.training.watch import Watch, read_table
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CalibrationError

SETTINGS = Settings(
    pretrain_steps=8, distill_steps=3, sparse_steps=3, length=32, batch=2, warmup=2, log_every=1, save_every=1
)
Make = Any


@pytest.fixture
def make(tiny_config: ModelConfig, stream: NDArray[Any]) -> Make:
    def trainer(folder: Path, settings: Settings = SETTINGS) -> Trainer:
        folder.mkdir(exist_ok=True)
        return Trainer(tiny_config, settings, stream, stream[:400], folder, Team())

    return trainer


def test_resuming_gives_the_same_curve(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "whole", dataclasses.replace(SETTINGS, save_every=100)).run()
    assert all((tmp_path / f"whole/after_{stage}.pt").exists() for stage in STAGES)
    for until in (3, 9, 12, None):
        make(tmp_path / "parts").run(until)
    whole, parts = (read_table(tmp_path / name / "training.csv") for name in ("whole", "parts"))
    assert [r["stage"] for r in whole] == ["pretrain"] * 8 + ["distill"] * 3 + ["sparse"] * 3
    for a, b in zip(whole, parts, strict=True):
        a.pop("seconds"), b.pop("seconds")
        assert a == b


def test_loss_falls(make: Make, tmp_path: Path) -> None:
    trainer = make(tmp_path, Settings(pretrain_steps=60, distill_steps=0, sparse_steps=0, length=32, batch=4, warmup=5))
    trainer.run()
    losses = [float(r["loss"]) for r in read_table(tmp_path / "training.csv")]
    assert losses[0] == pytest.approx(np.log(64), abs=0.3)
    assert losses[-1] < losses[0] - 1


def test_distillation_trains_the_indexer_alone(make: Make, tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.run(8)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.run(11)
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(".indexer." in name for name in changed)
    trainer.run()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any(".indexer." not in name for name in changed)


def test_an_epoch_sees_every_window_once() -> None:
    windows = Windows(np.arange(1000), 100, 3, seed=1)
    seen = torch.cat([windows(step) for step in range(3)])
    assert len({int(row[0]) for row in seen}) == 9
    assert (seen[:, 1:] - seen[:, :-1] == 1).all()
    assert not torch.equal(windows(0), windows(3))


def test_spikes_are_noticed() -> None:
    watch = Watch()
    assert not any(watch.step(i, 4.0, 1.0) for i in range(60))
    assert len(watch.step(60, 5.5, 9.0)) == 2
    assert watch.gates(1, {"gate_mean_0": 1.95, "gate_max_0": 1.99}) == [
        "step 1: gate_mean_0 = 1.950, outside 0.1 … 1.9"
    ]


@pytest.mark.parametrize("option", ["--workers", "--batch", "--pretrain-steps"])
def test_a_number_that_makes_no_run_is_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_small.main([str(tmp_path / "run"), option, "-1"])
    assert ended.value.code == 2
    assert f"{option} is -1; give" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def write_corpus(folder: Path, text: str) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"source": "a", "title": "b", "text": text}) + "\n")


@pytest.mark.parametrize("text", ["", "some words of text"])
def test_a_text_too_short_for_a_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    write_corpus(tmp_path, text)
    with pytest.raises(CalibrationError, match="The training text is too short"):
        prepare(tmp_path, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_an_interrupted_encoding_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(0).choice(list("etaoinshrdlu"), (3000, 8))
    write_corpus(tmp_path, " ".join(map("".join, words)))
    save = np.save

    def interrupted(path: Path, array: NDArray[Any]) -> None:
        save(path, array)
        path.write_bytes(path.read_bytes()[:-9])
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, tmp_path)
    monkeypatch.undo()
    _, tokens = prepare(tmp_path, tmp_path)
    assert len(tokens) > 20
