"""Trains one design and keeps what happened: a row for each step, and a record at the end.

`FOLDER/<design>.csv` has the curve, `FOLDER/<design>.json` the record. A record that is there and was made with the
same settings is used instead of training again, so an interrupted comparison goes on with the design it was at.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.learner import Learner
from flashnext.calibration.training.data import Tokens, Windows
from flashnext.calibration.training.settings import Settings
from flashnext.calibration.training.watch import Table, Watch, read_table
from flashnext.export.errors import FlashNextError

SETTLED = 0.2
"""Share of the steps after which gradient norms count: at first every design's norm falls steeply."""
LAST = 50
"""Steps whose mean loss is the training loss of the record."""
GLANCE, ALL = 64, 512
"""Held-out windows during training, and at its end."""


class Curve(Table):
    """A row for each step."""

    COLUMNS = ("step", "rate", "loss", "gradient_norm", "held_out_loss", "seconds")


@dataclasses.dataclass(frozen=True)
class Record:
    """One design's run."""

    design: str
    loss: float
    """training loss, mean of the last steps"""
    held_out_loss: float
    gradient_norm: float
    """mean after the first fifth of the steps, before clipping; the next two are over the same steps"""
    gradient_norm_variance: float
    gradient_norm_variation: float
    """standard deviation over mean"""
    spikes: int
    """sudden gradient norms or losses (see `Watch`)"""
    alarms: tuple[str, ...]
    """the design's own, each with the step at which it was first raised"""
    parameters: int
    window_losses: tuple[float, ...]
    """of each held-out window, to compare designs window by window"""
    made_with: Mapping[str, Any]


def made_with(shape: Shape, settings: Settings, tokens: Tokens, held_out: Tokens) -> dict[str, Any]:
    """All that a run depends on, in JSON's types."""
    sizes = {"training_tokens": len(tokens), "held_out_tokens": len(held_out), "held_out_windows": ALL}
    out: dict[str, Any] = json.loads(
        json.dumps({"shape": dataclasses.asdict(shape), "settings": dataclasses.asdict(settings), **sizes})
    )
    return out


def stored_record(path: Path, wanted: Mapping[str, Any]) -> Record | None:
    """The record in a file, if it is there with its curve beside it and was made with the same settings.

    Raises:
        FlashNextError: the file is not a record.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        record = Record(**{**fields, "alarms": tuple(fields["alarms"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FlashNextError(
            f"{path} is not a record of a run ({error}). Delete it, and the design trains again."
        ) from None
    return record if record.made_with == wanted and path.with_suffix(".csv").is_file() else None


class Run:
    """A design in training, step by step."""

    def __init__(
        self, design: str, shape: Shape, settings: Settings, tokens: Tokens, held_out: Tokens, folder: Path
    ) -> None:
        self.design, self.settings, self.folder = design, settings, folder
        self.windows, self.held_out = Windows(tokens, settings.length + 1, settings.batch, settings.seed), held_out
        self.made_with = made_with(shape, settings, tokens, held_out)
        self.learner = Learner(design, shape, settings)
        self.watch, self.alarms = Watch(), dict[str, str]()

    def train(self, after_step: Callable[[float], object]) -> Record:
        """All steps; `after_step` is called with each loss."""
        table, start = Curve(self.folder / f"{self.design}.csv", 0), time.perf_counter()
        for step in range(self.settings.steps):
            loss, norm = self.learner.step(self.windows(step), self.settings.rate(step))
            for line in self.watch.step(step, loss, norm):
                self._warn(line)
            row: dict[str, Any] = {"step": step, "rate": self.settings.rate(step), "loss": loss, "gradient_norm": norm}
            if step % self.settings.validate_every == 0:
                row["held_out_loss"] = float(self._held_out(GLANCE).mean())
            if step % self.settings.log_every == 0 or step == self.settings.steps - 1:
                self._look_for_alarms(step)
            table.add({**row, "seconds": time.perf_counter() - start})
            after_step(loss)
        return self._record()

    def _held_out(self, count: int) -> Any:
        return self.learner.held_out(self.held_out, self.settings.length, count)

    def _look_for_alarms(self, step: int) -> None:
        for line in self.learner.model.residual.alarms():
            what = line.split(" is ")[0]
            if what not in self.alarms:
                self.alarms[what] = f"step {step}: {line}"
                self._warn(self.alarms[what])

    def _warn(self, line: str) -> None:
        tqdm.write(f"warning: {self.design}, {line}", file=sys.stderr)

    def _record(self) -> Record:
        rows = read_table(self.folder / f"{self.design}.csv")
        losses, norms = (np.array([float(r[name]) for r in rows]) for name in ("loss", "gradient_norm"))
        settled = norms[int(SETTLED * len(norms)) :]
        windows = self._held_out(ALL)
        record = Record(
            design=self.design,
            loss=float(losses[-LAST:].mean()),
            held_out_loss=float(windows.mean()),
            gradient_norm=float(settled.mean()),
            gradient_norm_variance=float(settled.var()),
            gradient_norm_variation=float(settled.std() / settled.mean()),
            spikes=self.watch.spikes,
            alarms=tuple(self.alarms.values()),
            parameters=self.learner.count(),
            window_losses=tuple(round(float(w), 5) for w in windows),
            made_with=self.made_with,
        )
        partial = self.folder / f"{self.design}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(record)) + "\n", encoding="utf-8")
        os.replace(partial, self.folder / f"{self.design}.json")
        return record
