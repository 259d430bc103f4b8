"""Train the small model: tokenizer, dense pretraining, distillation of the indexer, sparse training.

    python -m flashnext.calibration.training.train_small FOLDER --corpus build/corpus
    python -m flashnext.calibration.training.train_small --smoke       # 300 steps in a few minutes, checks itself

Run again with the same folder to go on after an interruption. At the end the folder holds `training.csv`, a plot of
it, and `checkpoint/` in the official layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flashnext.calibration.corpus.build import read_documents
from flashnext.calibration.training.data import encode, prepare
from flashnext.calibration.training.plot import plot
from flashnext.calibration.training.settings import SMOKE, Settings
from flashnext.calibration.training.ship import write_checkpoint
from flashnext.calibration.training.small_config import small_config
from flashnext.calibration.training.team import Team, start
from flashnext.calibration.training.trainer import Trainer
from flashnext.calibration.training.watch import read_table
from flashnext.export.config import ModelConfig
from flashnext.export.errors import FlashNextError, message_at_exit

SMOKE_FALL = 1.5
"""Nats that the loss has to fall in a smoke run."""
LEAST = {"workers": 1, "batch": 1}


def train(settings: Settings, corpus: Path, folder: Path, team: Team) -> None:
    """One worker's run."""
    tokenizer, tokens = prepare(corpus, folder)
    held_out = encode(tokenizer, read_documents(corpus / "held_out.jsonl"))
    config = small_config()
    trainer = Trainer(ModelConfig.from_dict(config), settings, tokens, held_out, folder, team)
    trainer.run()
    if team.leads:
        write_checkpoint(trainer.model, config, tokenizer, folder / "checkpoint")
        print(f"Wrote {folder / 'checkpoint'}; {trainer.watch.spikes} spikes", file=sys.stderr)
        try:
            plot(folder / "training.csv", folder / "training.png")
        except FlashNextError as error:
            print(f"no plot: {error}", file=sys.stderr)


def check_smoke(folder: Path) -> str:
    """What a smoke run showed; raises when the loss did not fall or a norm ran away."""
    rows = read_table(folder / "training.csv")
    losses = np.array([float(r["loss"]) for r in rows])
    norms = np.array([float(r["gradient_norm"]) for r in rows if r["stage"] == "pretrain"])
    fall, spike = losses[0] - losses[-3:].mean(), norms[3:].max() / np.median(norms[3:])
    if fall < SMOKE_FALL or spike > 5:
        raise FlashNextError(f"Smoke run failed: loss fell by {fall:.2f}, largest gradient norm {spike:.1f} medians.")
    return f"Smoke run passed: loss fell from {losses[0]:.2f} to {losses[-1]:.2f}, no spikes."


@message_at_exit()
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Train the small model.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/train_small"))
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"), help="made by scripts/build_corpus")
    parser.add_argument("--smoke", action="store_true", help="300 short steps with checks")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    for stage in ("pretrain", "distill", "sparse"):
        parser.add_argument(f"--{stage}-steps", type=int, metavar="N")
    parser.add_argument("--batch", type=int, metavar="N", help="windows of a step, over all workers")
    options = vars(parser.parse_args(argv))
    for name in ("workers", "pretrain_steps", "distill_steps", "sparse_steps", "batch"):
        if options[name] is not None and options[name] < LEAST.get(name, 0):
            option = name.replace("_", "-")
            raise FlashNextError(f"--{option} is {options[name]}; give {LEAST.get(name, 0)} or more.")
    folder, corpus, smoke, workers = (options.pop(n) for n in ("folder", "corpus", "smoke", "workers"))
    settings = dataclasses.replace(
        SMOKE if smoke else Settings(), **{k: v for k, v in options.items() if v is not None}
    )
    folder.mkdir(parents=True, exist_ok=True)
    prepare(corpus, folder)
    torch.set_num_threads(1)
    start(partial(train, settings, corpus, folder), workers, (folder / "meeting").resolve())
    if smoke:
        print(check_smoke(folder))


if __name__ == "__main__":
    main()
