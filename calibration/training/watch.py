"""What is watched while training: one row of numbers for a step, a CSV file of them, and warnings.

Write gates near 0 or 2 have stopped listening (their sigmoid is saturated), and a gradient norm many times its usual
value says that a step went wrong; both are said at once instead of being found in a plot afterwards.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from flashnext.calibration.training.model import Trace

GATE_RANGE = (0.1, 1.9)
SPIKE = 4.0
"""A gradient norm this many times the median of the last steps is a spike."""
LOSS_SPIKE = 1.0
"""A loss this many nats above the median of the last steps is a spike."""
MEMORY = 50


def gate_columns(trace: Trace) -> dict[str, float]:
    """Mean, smallest and largest write gate of each branch, over tokens and layers."""
    gates = torch.cat([g.flatten(0, -2) for g in trace.write_gates])
    return {
        f"gate_{what}_{branch}": float(values[branch])
        for what, values in (("mean", gates.mean(0)), ("min", gates.amin(0)), ("max", gates.amax(0)))
        for branch in range(gates.shape[-1])
    }


def expert_columns(trace: Trace) -> dict[str, float]:
    """Largest and smallest share of the choices that an expert gets in any layer, times the number of experts."""
    share = torch.stack(trace.expert_share)
    return {"expert_max": float(share.max() * share.shape[1]), "expert_min": float(share.min() * share.shape[1])}


def branch_columns(residuals: list[Tensor]) -> dict[str, float]:
    """Norm of the loss's gradient at each residual branch, mean over layers."""
    norms = [r.grad.square().sum((0, 1, 3)).sqrt() for r in residuals if r.grad is not None]
    if not norms:
        return {}
    mean = torch.stack(norms).mean(0)
    return {f"gradient_branch_{i}": float(v) for i, v in enumerate(mean)}


class Watch:
    """Finds spikes and gates out of range."""

    def __init__(self) -> None:
        self.norms: deque[float] = deque(maxlen=MEMORY)
        self.losses: deque[float] = deque(maxlen=MEMORY)
        self.spikes = 0

    def step(self, step: int, loss: float, norm: float) -> list[str]:
        """Remember a step's numbers; returns warnings."""
        warnings = []
        if len(self.norms) == MEMORY and norm > SPIKE * median(self.norms):
            warnings.append(f"step {step}: gradient norm {norm:.2f}, usually {median(self.norms):.2f}")
        if len(self.losses) == MEMORY and loss > LOSS_SPIKE + median(self.losses):
            warnings.append(f"step {step}: loss {loss:.3f}, lately {median(self.losses):.3f}")
        self.spikes += len(warnings)
        self.norms.append(norm)
        self.losses.append(loss)
        return warnings

    @staticmethod
    def gates(step: int, columns: Mapping[str, float]) -> list[str]:
        """Warnings of branches whose mean write gate has run away."""
        low, high = GATE_RANGE
        means = {name: value for name, value in columns.items() if name.startswith("gate_mean")}
        return [f"step {step}: {n} = {v:.3f}, outside {low} … {high}" for n, v in means.items() if not low <= v <= high]


class Table:
    """A CSV file that gets a row now and then; a resumed run drops the rows after the step it resumes from."""

    COLUMNS = (
        "step", "stage", "tokens", "seconds", "rate", "loss", "draft_loss", "held_out_loss", "balance", "indexer_kl",
        "indexer_recall", "gradient_norm", *(f"gradient_branch_{i}" for i in range(4)),
        *(f"gate_{what}_{i}" for what in ("mean", "min", "max") for i in range(4)), "expert_max", "expert_min",
    )  # fmt: skip

    def __init__(self, path: Path, from_step: int) -> None:
        self.path = path
        kept = [row for row in read_table(path) if int(row["step"]) < from_step] if path.exists() else []
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self.COLUMNS)
            writer.writeheader()
            writer.writerows(kept)

    def add(self, row: Mapping[str, object]) -> None:
        shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            csv.DictWriter(stream, self.COLUMNS).writerow(shown)


def read_table(path: Path) -> list[dict[str, str]]:
    """Rows of a table as they are written."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
