"""The designs side by side: a table for the terminal, a CSV file, one JSON line, and a picture of the curves."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flashnext.calibration.residual_lab.cost import Cost
from flashnext.calibration.residual_lab.designs.catalogue import BASELINE
from flashnext.calibration.residual_lab.train import Record
from flashnext.calibration.training.plot import load_pyplot
from flashnext.calibration.training.watch import read_table
from flashnext.runtime.cli.table import render

HEADER = (
    "design", "loss", "held out", "- base", "±", "grad norm", "variance", "std/mean", "spikes", "alarms", "time",
    "+params", "+floats",
)  # fmt: skip
EXPLANATION = """\
loss: mean of the last 50 steps. - base: held-out loss less the baseline's, ± its standard error over windows of text
(another seed moves it more). grad norm, its variance and std/mean: after the first fifth of the steps. time: processor
time of a step over the baseline's. +params, +floats: parameters, and floats of the residual that a token moves, above
the baseline's."""
SMOOTH = 25
"""Steps in the moving mean of the pictures' curves."""
Row = dict[str, Any]


def rows_of(records: Sequence[Record], costs: Mapping[str, Cost]) -> list[Row]:
    """A row of figures for each design; differences are missing where the baseline is."""
    base = next((r for r in records if r.design == BASELINE), None)
    return [_row(record, base, costs[record.design]) for record in records]


def _row(record: Record, base: Record | None, cost: Cost) -> Row:
    fields = asdict(record)
    del fields["window_losses"], fields["made_with"]
    fields["alarms"] = len(record.alarms)
    difference = error = None
    if base is not None:
        by_window = np.array(record.window_losses) - np.array(base.window_losses)
        difference, error = float(by_window.mean()), float(by_window.std() / len(by_window) ** 0.5)
    return {**fields, "difference": difference, "difference_error": error, **asdict(cost)}


def table(rows: Sequence[Row]) -> str:
    """What people read."""
    return render(HEADER, [_cells(row) for row in rows]) + "\n\n" + EXPLANATION


def _cells(row: Row) -> list[str]:
    known = row["difference"] is not None
    return [
        row["design"],
        f"{row['loss']:.4f}",
        f"{row['held_out_loss']:.4f}",
        f"{row['difference']:+.4f}" if known else "",
        f"{row['difference_error']:.4f}" if known else "",
        f"{row['gradient_norm']:.3f}",
        f"{row['gradient_norm_variance']:.2e}",
        f"{row['gradient_norm_variation']:.3f}",
        str(row["spikes"]),
        str(row["alarms"]),
        f"{row['time_ratio']:.2f}",
        f"{row['extra_parameters']:,}",
        f"{row['extra_floats']:,}",
    ]


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The same figures for programs."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(_rounded(row) for row in rows)


def json_line(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Everything in one line."""
    return json.dumps({"made_with": settings, "designs": [_rounded(row) for row in rows]})


def _rounded(row: Row) -> Row:
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def plot(rows: Sequence[Row], folder: Path, picture: Path) -> None:
    """Loss and gradient norm against steps, held-out loss against cost, and the norm's variance, into a PNG file.

    Raises:
        FlashNextError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), constrained_layout=True)
    colours = pyplot.get_cmap("tab20")
    names = [row["design"] for row in rows]
    losses = {name: _curve(folder, name, "loss") for name in names}
    base = losses.get(BASELINE)
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        style = {"color": colours(number), "linewidth": 1.2}
        axes[0, 0].plot(*_smooth(losses[name] if base is None else losses[name] - base), label=name, **style)
        axes[0, 1].plot(*_smooth(_curve(folder, name, "gradient_norm")), **style)
        axes[1, 0].scatter(row["time_ratio"], row["held_out_loss"], color=colours(number))
        text = axes[1, 0].annotate("  " + name, (row["time_ratio"], row["held_out_loss"]), fontsize=7)
        text.set_in_layout(False)
        axes[1, 1].barh(number, row["gradient_norm_variance"], color=colours(number))
    axes[1, 1].set_yticks(range(len(names)), names, fontsize=7)
    axes[1, 0].margins(x=0.25)  # room for the names
    axes[1, 1].invert_yaxis()
    axes[0, 0].legend(fontsize=7, ncols=2)
    _title(axes[0, 0], "training loss" + ("" if base is None else f" less that of {BASELINE}"), "step")
    _title(axes[0, 1], "gradient norm before clipping", "step")
    _title(axes[1, 0], "held-out loss, nats per token", "processor time of a step over the baseline's")
    _title(axes[1, 1], "variance of the gradient norm", "after the first fifth of the steps")
    figure.savefig(picture, dpi=72)
    pyplot.close(figure)


def _curve(folder: Path, design: str, column: str) -> Any:
    return np.array([float(row[column]) for row in read_table(folder / f"{design}.csv")])


def _smooth(values: Any) -> tuple[Any, Any]:
    """Steps and moving means."""
    width = min(SMOOTH, len(values))
    return np.arange(width - 1, len(values)), np.convolve(values, np.ones(width) / width, "valid")


def _title(axis: Any, title: str, below: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(below)
    axis.grid(alpha=0.3)
