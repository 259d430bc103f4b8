"""Compare residual designs: train each on the same text from the same start, measure, report.

    python -m flashnext.calibration.residual_lab.compare --corpus build/corpus [--designs gated_residual …]

Each design trains for 500 steps with one seed; run again with the same folder to go on after an interruption. The
folder then holds a curve and a record of each design, `residual_lab.csv` and `residual_lab.png`. Standard output ends
with one JSON line (`--json`: has nothing else). docs/residual_lab.md says what came out, and what that can show.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from flashnext.calibration.corpus.build import read_documents
from flashnext.calibration.residual_lab import cost, report
from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.designs.catalogue import BASELINE, DESIGNS
from flashnext.calibration.residual_lab.learner import Learner
from flashnext.calibration.residual_lab.train import Record, Run, made_with, stored_record
from flashnext.calibration.training.data import Tokens, Windows, encode, prepare
from flashnext.calibration.training.optimizers import Rates
from flashnext.calibration.training.settings import Settings
from flashnext.export.errors import FlashNextError, message_at_exit

RANGES = {
    "steps": (1, 1_000_000),
    "seed": (0, 2**63 - 1),
    "batch": (1, 1024),
    "length": (2, 4096),
    "rate": (0.001, 100),
}
DEFAULTS = Settings(pretrain_steps=500, distill_steps=0, sparse_steps=0, length=128, batch=8, warmup=20, log_every=10)


def compare(
    designs: Sequence[str], shape: Shape, settings: Settings, corpus: Path, folder: Path
) -> tuple[list[report.Row], dict[str, object]]:
    """Train what is not trained yet, and measure all; returns the rows of the report, and what they were made with."""
    tokenizer, tokens = prepare(corpus, folder)
    held_out = encode(tokenizer, read_documents(corpus / "held_out.jsonl"))
    for what, stream in (("training", tokens), ("held-out", held_out)):
        if len(stream) < 2 * (settings.length + 1):
            raise FlashNextError(
                f"{corpus} has {len(stream):,} {what} tokens, too few for windows of {settings.length}: "
                "give a smaller --length."
            )
    records = train_all(designs, shape, settings, tokens, held_out, folder)
    learners = {n: Learner(n, shape, settings) for n in dict.fromkeys((BASELINE, *designs))}
    batch = Windows(tokens, settings.length + 1, settings.batch, settings.seed)(0)
    return report.rows_of(records, cost.measure(learners, shape, batch)), made_with(shape, settings, tokens, held_out)


def train_all(
    designs: Sequence[str], shape: Shape, settings: Settings, tokens: Tokens, held_out: Tokens, folder: Path
) -> list[Record]:
    """A record of each design: the stored one, or a new one."""
    wanted = made_with(shape, settings, tokens, held_out)
    stored = {name: stored_record(folder / f"{name}.json", wanted) for name in designs}
    missing = sum(record is None for record in stored.values())
    records = []
    with tqdm(total=missing * settings.steps, unit="step", mininterval=5, disable=not missing) as bar:

        def after_step(loss: float) -> None:
            bar.set_postfix(design=name, loss=f"{loss:.3f}", refresh=False)
            bar.update()

        for name, record in stored.items():
            if record is None:
                record = Run(name, shape, settings, tokens, held_out, folder).train(after_step)
                tqdm.write(f"{name}: held-out loss {record.held_out_loss:.4f}", file=sys.stderr)
            records.append(record)
    return records


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(description="Compare residual designs on one small backbone.")
    parser.add_argument("--designs", nargs="+", metavar="NAME", default=list(DESIGNS), help=", ".join(DESIGNS))
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps)
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed)
    parser.add_argument("--batch", type=int, default=DEFAULTS.batch, help="windows of a step")
    parser.add_argument("--length", type=int, default=DEFAULTS.length, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--corpus", type=Path, default=Path("build/corpus"), help="made by scripts/build_corpus")
    parser.add_argument("--out", type=Path, default=Path("build/residual_lab"), help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args(argv)
    unknown = [name for name in options.designs if name not in DESIGNS]
    if unknown:
        raise FlashNextError(f"There is no design {unknown[0]!r}; there are: {', '.join(DESIGNS)}.")
    for name, (low, high) in RANGES.items():
        if not low <= getattr(options, name) <= high:
            raise FlashNextError(f"--{name} is {getattr(options, name)}; give a number from {low} to {high:,}.")
    if options.out.exists() and not options.out.is_dir():
        raise FlashNextError(f"--out {options.out} is not a folder; name another place for the results.")
    return options


def run(argv: Sequence[str] | None) -> None:
    """The command, with errors for the caller."""
    options = arguments(argv)
    settings = dataclasses.replace(DEFAULTS, pretrain_steps=options.steps, seed=options.seed)
    rates = Rates(**{name: options.rate * rate for name, rate in dataclasses.asdict(DEFAULTS.rates).items()})
    settings = dataclasses.replace(settings, batch=options.batch, length=options.length, rates=rates)
    for name in ("train.jsonl", "held_out.jsonl"):
        read_documents(options.corpus / name)
    options.out.mkdir(parents=True, exist_ok=True)
    designs = list(dict.fromkeys(options.designs))
    rows, made = compare(designs, Shape(), settings, options.corpus, options.out)
    report.write_csv(rows, options.out / "residual_lab.csv")
    if not options.json:
        print(report.table(rows))
    try:
        report.plot(rows, options.out, options.out / "residual_lab.png")
    except FlashNextError as error:
        print(f"no plot: {error}", file=sys.stderr)
    print(report.json_line(rows, made))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; what a user can mend ends with one message and exit code 2."""
    torch.set_num_threads(1)
    with message_at_exit():
        run(argv)


if __name__ == "__main__":
    main()
