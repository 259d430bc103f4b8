"""Settings of a training run: the recipe's numbers, and the small run that only shows that training works."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flashnext.calibration.training.optimizers import Rates

Stage = Literal["pretrain", "distill", "sparse"]
STAGES: tuple[Stage, ...] = ("pretrain", "distill", "sparse")


@dataclass(frozen=True)
class Settings:
    """One run. Steps are counted through all stages."""

    pretrain_steps: int = 1080
    """dense attention, the indexer does not train"""
    distill_steps: int = 50
    """only the indexer trains, taught by dense attention over all complete blocks"""
    sparse_steps: int = 320
    """everything trains with sparse attention, the indexer over the blocks that it chose"""
    length: int = 512
    batch: int = 4
    seed: int = 0
    rates: Rates = field(default_factory=Rates)
    warmup: int = 40
    draft_weight: float = 0.3
    """of the draft layer's loss (DeepSeek-V3, arXiv 2412.19437, section 4.2: 0.3 at first)"""
    balance_weight: float = 0.01
    clip: float = 1.0
    log_every: int = 20
    validate_every: int = 100
    save_every: int = 20

    @property
    def steps(self) -> int:
        return self.pretrain_steps + self.distill_steps + self.sparse_steps

    def stage(self, step: int) -> Stage:
        """The stage that a step belongs to."""
        if step < self.pretrain_steps:
            return "pretrain"
        return "distill" if step < self.pretrain_steps + self.distill_steps else "sparse"

    def rate(self, step: int) -> float:
        """Factor on the peak learning rates.

        Linear warm-up, a plateau for half of the pretraining, then linearly down to a fifth at its end. The indexer
        alone trains at half the peak. Sparse training goes on from where pretraining ended, down to a fiftieth.
        """
        stage = self.stage(step)
        if stage == "distill":
            return 0.5
        if stage == "sparse":
            done = (step - self.pretrain_steps - self.distill_steps) / max(self.sparse_steps, 1)
            return 0.2 + (0.02 - 0.2) * done
        fall = (step / self.pretrain_steps - 0.5) / 0.5
        return min((step + 1) / self.warmup, 1.0 - 0.8 * max(fall, 0.0))


SMOKE = Settings(pretrain_steps=240, distill_steps=30, sparse_steps=30, length=128, batch=4, warmup=20)
"""300 steps in a few minutes: does the loss fall, are there no spikes."""
