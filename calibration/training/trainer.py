"""The training loop: stages, checkpoints of its own to resume from, and the record of what is watched.

A step's batch depends on the seed and the step's number alone, and all state is in `state.pt`, so a run that was
interrupted gives the curve of one that was not.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from flashnext.calibration.training import watch
from flashnext.calibration.training.data import Tokens, Windows
from flashnext.calibration.training.model import TrainingModel
from flashnext.calibration.training.objectives import Objective, objective, token_losses, trainable
from flashnext.calibration.training.optimizers import Optimizers, cuts_of
from flashnext.calibration.training.settings import Settings, Stage
from flashnext.calibration.training.team import Team
from flashnext.calibration.training.weights import initialize
from flashnext.export.config import ModelConfig

HELD_OUT_WINDOWS = 16


class Trainer:
    """A model, its optimizers and where it is in its run."""

    def __init__(
        self, config: ModelConfig, settings: Settings, tokens: Tokens, held_out: Tokens, folder: Path, team: Team
    ) -> None:
        self.settings, self.folder, self.team = settings, folder, team
        self.windows = Windows(tokens, settings.length, settings.batch, settings.seed)
        self.held_out = Windows(held_out, settings.length, 1, settings.seed)
        self.model = TrainingModel(config)
        initialize(self.model, settings.seed)
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        self.optimizers = Optimizers(self.parameters, cuts_of(self.parameters, config), settings.rates)
        self.watch = watch.Watch()
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.resume()

    def run(self, until: int | None = None) -> None:
        """Train to the end, or to a step."""
        end = self.settings.steps if until is None else until
        table = watch.Table(self.folder / "training.csv", self.step) if self.team.leads else None
        bar = tqdm(total=end, initial=self.step, unit="step", disable=not self.team.leads, mininterval=5)
        while self.step < end:
            row, start = self.train_step(), time.perf_counter()
            if table is not None and row:
                row["held_out_loss"] = self.validate()
                table.add(row)
                bar.set_postfix(stage=row["stage"], loss=f"{row['loss']:.3f}", held_out=row["held_out_loss"])
            self.seconds += time.perf_counter() - start
            bar.update()
            if self.team.leads and (
                self.step % self.settings.save_every == 0 or self.step == end or self._stage_ends()
            ):
                self.save()

    def train_step(self) -> dict[str, Any]:
        """One step; returns the row to record, empty when none is due."""
        start, settings = time.perf_counter(), self.settings
        stage = settings.stage(self.step)
        logs = self.step % settings.log_every == 0 or self.step == settings.steps - 1
        self._freeze(stage)
        result = objective(self.model, self.team.share(self.windows(self.step)), stage, settings)
        residuals = [r for r in result.output.trace.residuals if r.requires_grad] if logs else []
        for r in residuals:
            r.retain_grad()
        result.total.backward()
        self.team.average_gradients(self.parameters.values())
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), settings.clip))
        self.optimizers.step(settings.rate(self.step))
        self._warn(self.watch.step(self.step, result.parts["loss"], norm))
        self.seconds += time.perf_counter() - start
        self.tokens += settings.batch * settings.length
        row = self._row(stage, result, norm, residuals) if logs else {}
        self.step += 1
        return row

    @torch.no_grad()
    def validate(self) -> float | str:
        """Held-out loss on a few windows when it is due (a rough value: the evaluation uses all of them)."""
        done, settings = self.step, self.settings
        if done % settings.validate_every != 1 and done != settings.steps:
            return ""
        mode = "sparse" if settings.stage(done - 1) == "sparse" else "plain"
        count = min(HELD_OUT_WINDOWS, self.held_out.per_epoch)
        windows = [self.held_out(i) for i in range(count)]
        losses = [token_losses(self.model, self.model(w, mode=mode, draft=False), w)[0] for w in windows]
        return round(float(torch.stack(losses).mean()), 4)

    # --- what is kept ------------------------------

    def save(self) -> None:
        """Everything that the next step depends on, written so that an interruption leaves the old or the new file."""
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
        }
        partial = self.folder / "state.partial"
        torch.save(state, partial)
        os.replace(partial, self.folder / "state.pt")
        if self._stage_ends():
            torch.save(state["model"], self.folder / f"after_{self.settings.stage(self.step - 1)}.pt")

    def _stage_ends(self) -> bool:
        ended = self.settings.stage(self.step - 1)
        return self.step == self.settings.steps or self.settings.stage(self.step) != ended

    def resume(self) -> None:
        """Go on from the folder's state, if it has one."""
        path = self.folder / "state.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    # --- parts of a step ------------------------------

    def _freeze(self, stage: Stage) -> None:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(trainable(name, stage))
            parameter.grad = None

    def _row(self, stage: Stage, result: Objective, norm: float, residuals: list[Tensor]) -> dict[str, Any]:
        trace = result.output.trace
        gates = watch.gate_columns(trace)
        self._warn(self.watch.gates(self.step, gates))
        return {
            "step": self.step,
            "stage": stage,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "rate": self.settings.rate(self.step),
            "gradient_norm": norm,
            **result.parts,
            **gates,
            **watch.expert_columns(trace),
            **watch.branch_columns(residuals),
        }

    def _warn(self, lines: list[str]) -> None:
        if self.team.leads:
            for line in lines:
                tqdm.write(f"warning: {line}", file=sys.stderr)
