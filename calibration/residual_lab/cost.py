"""What a step of each design costs: processor time next to the baseline's, parameters, floats moved.

Training runs follow each other on a machine whose load changes, so their times say little. Here the designs take
turns: in each round every design does one step, a round gives one ratio to the baseline's step of that round, and the
median over rounds is reported. Time is that of this process alone, though what else runs still shares its caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

from torch import Tensor

from flashnext.calibration.residual_lab.backbone import Backbone
from flashnext.calibration.residual_lab.designs.base import Shape
from flashnext.calibration.residual_lab.designs.catalogue import BASELINE
from flashnext.calibration.residual_lab.learner import Learner

ROUNDS = 15
RATE = 0.1
"""Of the peak learning rates: what is measured are the steps, not what they learn."""


@dataclass(frozen=True)
class Cost:
    """What a design takes next to the baseline."""

    time_ratio: float
    """processor time of a training step over the baseline's"""
    extra_parameters: int
    extra_floats: int
    """floats of the residual that a token moves on its way through the layers, above the baseline's"""


def measure(learners: Mapping[str, Learner], shape: Shape, tokens: Tensor, rounds: int = ROUNDS) -> dict[str, Cost]:
    """Costs of designs by name, the baseline among them; the learners are trained by it."""
    ratios = time_ratios({name: partial(x.step, tokens, RATE) for name, x in learners.items()}, BASELINE, rounds)
    base = learners[BASELINE]
    return {
        name: Cost(
            ratios[name],
            learner.count() - base.count(),
            floats_moved(learner.model, shape) - floats_moved(base.model, shape),
        )
        for name, learner in learners.items()
    }


def floats_moved(model: Backbone, shape: Shape) -> int:
    """Floats of the residual that a token reads and writes on its way up (see `Design.rows_moved`)."""
    return shape.hidden * sum(model.residual.rows_moved(block) for block in range(shape.blocks + 1))


def time_ratios(steps: Mapping[str, Callable[[], object]], baseline: str, rounds: int) -> dict[str, float]:
    """Median over rounds of each step's processor time over the baseline's; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    base = seconds[baseline][1:]
    return {name: median(a / b for a, b in zip(times[1:], base, strict=True)) for name, times in seconds.items()}
