"""From a checkpoint and text to scales for an FP8 residual, and to the figures of a report.

    result = calibrate(Job("models/small", ["text.txt"]))
    result.scales.write("scales.json")

One pass of the model over the calibration text collects statistics and a sample of tokens; scales are searched on the
sample; with `report` the model is run over held-out text under every way of storing the residual.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flashnext.calibration.residual.observers import FiniteCheck, Several, Statistics
from flashnext.calibration.residual.quality import Quality, Way, measure, measure_steps
from flashnext.calibration.residual.sample import TokenSample
from flashnext.calibration.residual.search import METHODS, ScaleSearch
from flashnext.calibration.residual.storage import Fp8Storage, bf16_storage
from flashnext.calibration.residual.stream import ResidualModel
from flashnext.calibration.residual.text import TextReader, Windows, choose, repeated_share
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import CalibrationError
from flashnext.export.ops.reference.residual_store import E4M3, E5M2, FORMATS
from flashnext.export.residual_scales import ResidualScales, store_names

TOKENS_AT_ONCE = 2048
DYNAMIC = "dynamic"
MAX_REPEATED = 0.1
"""Share of held-out text that may be in the calibration text (licences and headings repeat)."""


@dataclass(frozen=True)
class Job:
    """What to do. `method` is one of `search.METHODS`; `held_out` are files for the report (without them it gets
    windows of `text` that calibration leaves out)."""

    checkpoint: str | Path
    text: Sequence[str | Path]
    held_out: Sequence[str | Path] = ()
    method: str = "input"
    mode: str = "static"
    form: str = "e4m3"
    tokens: int = 65_536
    held_out_tokens: int = 16_384
    length: int = 512
    seed: int = 0
    report: bool = False

    @property
    def batch(self) -> int:
        """Windows at once."""
        return max(TOKENS_AT_ONCE // self.length, 1)


@dataclass(frozen=True)
class Findings:
    """All that a report is made of."""

    job: Job
    checkpoint: Checkpoint
    identity: str
    text: Windows
    held_out: Windows
    statistics: Statistics
    scales: dict[str, dict[str, tuple[float, ...]]]
    """e4m3, by method and store"""
    input_errors: dict[str, dict[str, list[float]]]
    """e4m3, by method ("dynamic" too) and store: of the next block's input, one branch rounded at a time"""
    lost: dict[str, dict[str, tuple[list[float], list[float]]]]
    """e4m3, by method and store: lost updates by number and by energy, on the sample"""
    quality: list[Quality]


@dataclass(frozen=True)
class Result:
    """What calibration gives; `findings` with `Job.report`."""

    scales: ResidualScales
    findings: Findings | None


class Progress(Protocol):
    """Told how many steps there are, what is under way, and each step's end."""

    def start(self, steps: int) -> None:
        """The number of steps is known."""

    def stage(self, what: str) -> None:
        """Something else begins."""

    def step(self) -> None:
        """A step is done."""


class _Silent:
    """Nobody watches."""

    def start(self, steps: int) -> None: ...
    def stage(self, what: str) -> None: ...
    def step(self) -> None: ...


def calibrate(job: Job, progress: Progress | None = None) -> Result:
    """Find scales.

    Raises:
        CalibrationError: text that cannot be used, or a model that is not finite on it.
        CheckpointError, ConfigError: a checkpoint that cannot be used.
    """
    progress = progress or _Silent()
    checkpoint = Checkpoint.open(job.checkpoint)
    _check_length(job, checkpoint)
    progress.stage("reading text")
    text, held_out = _windows(job, checkpoint)
    progress.stage("loading the model")
    model = ResidualModel.open(checkpoint, job.batch, max(text.length, held_out.length))
    try:
        return _calibrate(job, checkpoint, model, text, held_out, progress)
    finally:
        model.close()


def _check_length(job: Job, checkpoint: Checkpoint) -> None:
    most = checkpoint.config.max_position_embeddings
    if job.length > most:
        raise CalibrationError(f"Windows of {job.length:,} tokens are longer than the model's context of {most:,}.")


def _windows(job: Job, checkpoint: Checkpoint) -> tuple[Windows, Windows]:
    """Calibration and held-out windows; the latter empty without a report."""
    reader = TextReader(checkpoint)
    stream = reader.stream(job.text)
    if not job.report:
        (text,) = choose(stream, job.length, job.tokens, job.seed)
        return text, Windows(text.tokens[:0], job.seed)
    if not job.held_out:
        sizes = (job.tokens, job.held_out_tokens)
        text, held_out = choose(stream, job.length, sizes, job.seed, ("calibration text", "held-out text"))
        return text, held_out
    (text,) = choose(stream, job.length, job.tokens, job.seed)
    (held_out,) = choose(reader.stream(job.held_out), job.length, job.held_out_tokens, job.seed)
    share = repeated_share(text, held_out)
    if share > MAX_REPEATED:
        raise CalibrationError(
            f"{share:.0%} of the held-out text is in the calibration text too. Give held-out text of its own, or none: "
            "then windows of the text are held out."
        )
    return text, held_out


def _calibrate(
    job: Job, checkpoint: Checkpoint, model: ResidualModel, text: Windows, held_out: Windows, progress: Progress
) -> Result:
    names = store_names(checkpoint.config)
    searches = _searches(job)
    ways = 2 + len(searches) + len(_DYNAMIC_WAYS) + 1
    batches = -(-len(text.tokens) // job.batch)
    measuring = measure_steps(held_out, ways, job.batch) if job.report else 0
    progress.start(batches + len(searches) * len(names) + measuring)
    progress.stage("calibrating")
    statistics = Statistics(checkpoint.config)
    sample = TokenSample(checkpoint.config, names, text.count, job.seed)
    watchers = Several([FiniteCheck(), statistics, sample])
    for tokens in text.batches(job.batch):
        model.run(tokens, watchers, logits=False, drafts=True)
        progress.step()
    progress.stage("searching scales")
    with torch.inference_mode():
        searching = {name: ScaleSearch(statistics, sample, form) for name, form in FORMATS.items()}
        found = {(form, m): searching[form].scales(m, progress.step) for form, m in searches}
        scales = _scales(job, model.identity, text, found)
        if not job.report:
            return Result(scales, None)
        e4m3 = {method: of for (form, method), of in found.items() if form == E4M3.name}
        errors: dict[str, dict[str, list[float]]] = {m: searching[E4M3.name].errors(of) for m, of in e4m3.items()}
        errors[DYNAMIC] = searching[E4M3.name].errors(None)
        lost = {m: searching[E4M3.name].lost(of) for m, of in e4m3.items()}
    progress.stage("measuring on held-out text")
    quality = measure(model, held_out, _ways(job, names, found), job.batch, progress.step)
    findings = Findings(
        job, checkpoint, model.identity, text, held_out, statistics, e4m3, errors, lost, quality
    )  # fmt: skip
    return Result(scales, findings)


def _searches(job: Job) -> list[tuple[str, str]]:
    """(format, method) of the scales that are needed: the wanted ones; for a report every method in e4m3, and two in
    e5m2."""
    found = []
    if job.report:
        found = [(E4M3.name, m) for m in METHODS] + [(E5M2.name, m) for m in ("max", job.method)]
    if job.mode == "static":
        found.append((job.form, job.method))
    return list(dict.fromkeys(found))


def _scales(
    job: Job, identity: str, text: Windows, found: dict[tuple[str, str], dict[str, tuple[float, ...]]]
) -> ResidualScales:
    static = job.mode == "static"
    return ResidualScales(
        checkpoint=identity,
        method=job.method if static else DYNAMIC,
        mode=job.mode,
        format=job.form,
        text=text.record(),
        scales=found[job.form, job.method] if static else {},
        producer=f"flashnext-trt {importlib.metadata.version('flashnext-trt')}",
    )


_DYNAMIC_WAYS: tuple[tuple[str, str, bool], ...] = (
    ("e4m3 dynamic", "e4m3", False),
    ("e4m3 dynamic, stochastic", "e4m3", True),
    ("e5m2 dynamic", "e5m2", False),
)


def _ways(job: Job, names: tuple[str, ...], found: dict[tuple[str, str], dict[str, tuple[float, ...]]]) -> list[Way]:
    """The unquantized residual, the yardstick, and the ways that are compared with it."""
    ways = [Way("float32 (unquantized)"), Way("bf16", bf16_storage)]
    ways += [
        Way(f"{form} static {method}", Fp8Storage(FORMATS[form], names, of)) for (form, method), of in found.items()
    ]
    method = job.method if (E4M3.name, job.method) in found else "input"
    ways.append(Way(f"e4m3 static {method}, stochastic", Fp8Storage(E4M3, names, found[E4M3.name, method], job.seed)))
    for name, form, stochastic in _DYNAMIC_WAYS:
        ways.append(Way(name, Fp8Storage(FORMATS[form], names, None, job.seed if stochastic else None)))
    return ways


def facts_of(result: Result) -> dict[str, Any]:
    """What a command prints about scales."""
    scales = result.scales
    values = [v for of_store in scales.scales.values() for v in of_store]
    return {
        "method": scales.method,
        "mode": scales.mode,
        "format": scales.format,
        "checkpoint": scales.checkpoint,
        "stores": len(scales.scales),
        "smallest_scale": min(values, default=None),
        "largest_scale": max(values, default=None),
        "text": {"sha256": scales.text.sha256, "tokens": scales.text.sequences * scales.text.length,
                 "length": scales.text.length, "seed": scales.text.seed},
    }  # fmt: skip
