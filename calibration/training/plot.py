"""A picture of a run's table: losses, gradient norms, write gates, the indexer, the router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashnext.calibration.training.watch import GATE_RANGE, read_table
from flashnext.export.errors import FlashNextError

Rows = Sequence[dict[str, str]]
BRANCHES = range(4)
PANELS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("loss, nats per token", ("loss", "draft_loss", "held_out_loss"), False),
    ("gradient norm", ("gradient_norm", *(f"gradient_branch_{i}" for i in BRANCHES)), True),
    ("write gates: mean", tuple(f"gate_mean_{i}" for i in BRANCHES), False),
    ("write gates: smallest and largest", tuple(f"gate_{w}_{i}" for w in ("min", "max") for i in BRANCHES), False),
    ("indexer", ("indexer_kl", "indexer_recall"), False),
    ("experts: share of choices / even share", ("expert_max", "expert_min"), False),
)
"""Title, columns, and whether the axis is logarithmic."""


def plot(table: Path, picture: Path) -> None:
    """Draw a table into a PNG file.

    Raises:
        FlashNextError: matplotlib is not installed.
    """
    pyplot = load_pyplot()
    rows = read_table(table)
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7), constrained_layout=True)
    for axis, (title, columns, logarithmic) in zip(axes.flat, PANELS, strict=True):
        _panel(axis, rows, title, columns)
        if logarithmic:
            axis.set_yscale("log")
        if title.startswith("write gates: smallest"):
            for limit in GATE_RANGE:
                axis.axhline(limit, color="grey", linestyle=":")
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)


def load_pyplot() -> Any:
    """The module that draws, set to draw into files.

    Raises:
        FlashNextError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise FlashNextError("Plots need matplotlib: pip install matplotlib (or the extra `train`).") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _panel(axis: Any, rows: Rows, title: str, columns: Sequence[str]) -> None:
    for column in columns:
        points = [(int(r["step"]), float(r[column])) for r in rows if r[column]]
        if points:
            axis.plot(*zip(*points, strict=True), label=column, linewidth=1)
    for step, stage in _beginnings(rows):
        axis.axvline(step, color="lightgrey")
        axis.annotate(stage, (step, 1.0), xycoords=("data", "axes fraction"), fontsize=7, va="bottom")
    axis.set_title(title, pad=14)
    axis.set_xlabel("step")
    axis.legend(fontsize=7)


def _beginnings(rows: Rows) -> list[tuple[int, str]]:
    """Where each stage starts."""
    return [
        (int(row["step"]), row["stage"])
        for previous, row in zip([None, *rows[:-1]], rows, strict=True)
        if previous is None or previous["stage"] != row["stage"]
    ]
