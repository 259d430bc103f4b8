"""The comparison from the corpus to its report: complete, repeatable, resumable, clear about bad input."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnext.calibration.residual_lab import compare, cost
from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.designs.catalogue import DESIGNS
from flashnext.calibration.residual_lab.train import Run, read_table
from flashnext.calibration.training.settings import Settings

ROOT = Path(__file__).parents[3]
TINY = Shape(hidden=16, layers=2, heads=2, mlp=16, rank=2)
SENTENCE = "It is a truth universally acknowledged, that a single man must be in want of a wife. "


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A corpus, and a folder whose tokens are made already (a tokenizer cannot be learnt from so little text)."""
    corpus, folder = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir(), folder.mkdir()
    for name in ("train", "held_out"):
        document = {"source": "test", "title": name, "text": SENTENCE * 40}
        (corpus / f"{name}.jsonl").write_text(json.dumps(document) + "\n", encoding="utf-8")
    prepare_folder(folder)
    monkeypatch.setattr(compare, "Shape", lambda: TINY)
    monkeypatch.setattr(compare, "DEFAULTS", dataclasses.replace(compare.DEFAULTS, length=32, batch=2))
    return corpus, folder


def prepare_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "models/small/tokenizer.json", folder)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 4096, 2000).astype(np.uint16))


def call(lab: tuple[Path, Path], *more: str) -> None:
    corpus, folder = lab
    compare.main(["--corpus", str(corpus), "--out", str(folder), *more])


def test_report_of_all_designs(lab: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    call(lab, "--steps", "3")
    out, folder = capsys.readouterr().out, lab[1]
    made = json.loads(out.splitlines()[-1])
    assert [row["design"] for row in made["designs"]] == list(DESIGNS)
    rows = list(csv.DictReader((folder / "residual_lab.csv").open(encoding="utf-8")))
    for name, line, row in zip(DESIGNS, rows, made["designs"], strict=True):
        assert name in out
        assert len(read_table(folder / f"{name}.csv")) == 3
        assert float(line["held_out_loss"]) == row["held_out_loss"] == pytest.approx(np.log(4096), abs=0.5)
        assert row["time_ratio"] > 0
        assert row["gradient_norm_variation"] == pytest.approx(
            row["gradient_norm_variance"] ** 0.5 / row["gradient_norm"], rel=1e-4
        )
    base = made["designs"][0]
    assert (base["difference"], base["time_ratio"], base["extra_parameters"], base["extra_floats"]) == (0, 1, 0, 0)
    assert (folder / "residual_lab.png").read_bytes().startswith(b"\x89PNG")


def test_going_on_and_repeating(lab: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = lab[1]
    call(lab, "--steps", "3", "--designs", "gated_norm", "--json")
    assert capsys.readouterr().out.count("\n") == 1
    first = (folder / "gated_norm.csv").read_bytes()
    call(lab, "--steps", "3", "--designs", "gated_norm", "pre_norm", "--json")
    assert (folder / "gated_norm.csv").read_bytes() == first, "trained again although its record was there"
    (folder / "gated_norm.json").unlink()
    call(lab, "--steps", "3", "--designs", "gated_norm", "--json")
    assert losses(folder) == losses(folder, first)
    call(lab, "--steps", "3", "--designs", "gated_norm", "--seed", "1", "--json")
    assert losses(folder) != losses(folder, first)
    call(lab, "--steps", "3", "--designs", "gated_norm", "--rate", "0.5", "--json")
    assert losses(folder)[0] == losses(folder, first)[0]
    assert losses(folder) != losses(folder, first)


def losses(folder: Path, data: bytes | None = None) -> list[str]:
    text = data if data is not None else (folder / "gated_norm.csv").read_bytes()
    return [row["loss"] for row in csv.DictReader(text.decode().splitlines())]


def test_loss_falls_and_alarms_are_kept(tmp_path: Path) -> None:
    settings = Settings(pretrain_steps=40, distill_steps=0, sparse_steps=0, length=32, batch=4, warmup=4, log_every=10)
    tokens = (np.cumsum(np.random.default_rng(0).integers(0, 3, 3000)) % 60).astype(np.uint16)
    run = Run("multi_channel_4", TINY, settings, tokens, tokens[:500], tmp_path)
    run.learner.model.residual.scales[1].data[0, 2] = 5.0  # type: ignore[index, union-attr]
    record = run.train(lambda loss: None)
    assert record.loss < float(read_table(tmp_path / "multi_channel_4.csv")[0]["loss"]) - 1
    assert len(record.alarms) == 1, "an alarm is given once"
    assert record.alarms[0].startswith("step 0: read scale of channel 2 in block 1 is ")


def test_time_ratios() -> None:
    def busy(rounds: int) -> Any:
        return lambda: sum(i * i for i in range(rounds * 20_000))

    ratios = cost.time_ratios({"base": busy(1), "thrice": busy(3)}, "base", 9)
    assert ratios["base"] == 1
    assert ratios["thrice"] == pytest.approx(3, rel=0.4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--designs", "pre_norn"], "There is no design 'pre_norn'; there are: pre_norm, "),
        (["--steps", "0"], "--steps is 0; give a number from 1 to 1,000,000."),
        (["--batch", "0"], "--batch is 0; give a number from 1 to 1,024."),
        (["--rate", "nan"], "--rate is nan; give a number from 0.001 to 100."),
        (["--length", "4000"], "2,000 training tokens, too few for windows of 4000: give a smaller --length."),
        (["--seed", "-1"], "--seed is -1; give a number from 0 to "),
        (["--corpus", "nowhere"], "train.jsonl does not exist. Build the corpus first: scripts/build_corpus nowhere"),
        (["--out", __file__], "is not a folder; name another place for the results."),
    ],
)
def test_bad_input(lab: tuple[Path, Path], capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        call(lab, *more)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_record_that_is_none(lab: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (lab[1] / "pre_norm.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SystemExit):
        call(lab, "--designs", "pre_norm")
    assert "is not a record of a run" in capsys.readouterr().err
