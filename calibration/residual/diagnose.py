"""What the residual stream of a checkpoint does on text: gates and paths, as data for the command and the page.

findings = diagnose(Job(checkpoint="…", text=["book.txt"]))
report = build(findings)                     # plain data
report = build(findings, against=other)      # … with the differences to a second checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnext.calibration.residual.gates import GateListener
from flashnext.calibration.residual.observers import FiniteCheck, Several
from flashnext.calibration.residual.paths import Block, PathListener, Paths
from flashnext.calibration.residual.stream import ResidualModel
from flashnext.calibration.residual.text import TextReader, Windows, choose
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.config import ModelConfig
from flashnext.export.errors import CalibrationError

BATCH = 4
LONG_SPAN = 12


@dataclass(frozen=True)
class Job:
    """One run: `tokens` of the text in windows of `length`, chosen by `seed`."""

    checkpoint: str | Path
    text: Sequence[str | Path]
    tokens: int = 8192
    length: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Findings:
    """Gates and paths of one checkpoint."""

    folder: Path
    identity: str
    config: ModelConfig
    windows: Windows
    gates: GateListener
    paths: Paths


def diagnose(job: Job, progress: Callable[[int], object] = lambda tokens: None) -> Findings:
    """Run the model over the text; `progress` is told the tokens of each batch.

    Raises:
        CalibrationError: text that cannot be used, or a model that is not finite (the site is named).
        CheckpointError: a checkpoint that cannot be read.
        ConfigError: windows longer than the model's context.
    """
    checkpoint = Checkpoint.open(Path(job.checkpoint))
    (windows,) = choose(TextReader(checkpoint).stream(job.text), job.length, job.tokens, job.seed)
    model = ResidualModel.open(checkpoint, BATCH, windows.length)
    gates, paths = GateListener(), PathListener(checkpoint.config)
    listener = Several([FiniteCheck(), gates, paths])
    try:
        for batch in windows.batches(BATCH):
            model.run(batch, listener, logits=False)
            progress(batch.size - len(batch))
    finally:
        model.close()
    return Findings(checkpoint.folder, model.identity, checkpoint.config, windows, gates, paths.result())


def build(findings: Findings, against: Findings | None = None) -> dict[str, Any]:
    """The findings as plain data, with the difference to a second checkpoint of the same shape.

    Raises:
        CalibrationError: the two checkpoints have different blocks or branches.
    """
    report = _facts(findings)
    if against is not None:
        shapes = [(f.paths.readers, f.paths.sources, f.config.hc_count) for f in (findings, against)]
        if shapes[0] != shapes[1]:
            raise CalibrationError(
                f"{against.folder} has other layers or branches than {findings.folder}, so their paths cannot be "
                "compared. Compare checkpoints of one architecture."
            )
        report["against"] = _facts(against)
        report["difference"] = {
            "shares": (findings.paths.shares - against.paths.shares).tolist(),
            "by_span": _minus(report["by_span"], report["against"]["by_span"]),
            "mean_spans": [a - b for a, b in zip(report["mean_spans"], report["against"]["mean_spans"], strict=True)],
        }
    return report


def _facts(findings: Findings) -> dict[str, Any]:
    paths, text = findings.paths, findings.windows.record()
    return {
        "checkpoint": {
            "folder": str(findings.folder),
            "identity": findings.identity,
            "layers": findings.config.num_hidden_layers,
            "branches": findings.config.hc_count,
            "hidden_size": findings.config.hidden_size,
        },
        "text": {"tokens": findings.windows.count, "length": text.length, "seed": text.seed, "sha256": text.sha256},
        "gates": {
            name: {
                "read_mean": site.read_mean(),
                "write_mean": site.write_mean(),
                "write_min": [] if site.write_min is None else site.write_min.tolist(),
                "write_max": [] if site.write_max is None else site.write_max.tolist(),
            }
            for name, site in findings.gates.sites.items()
        },
        "remarkable_gates": [
            {"site": site, "branch": branch, "mean": mean, "kind": kind}
            for site, branch, mean, kind in findings.gates.remarkable()
        ],
        "readers": _places(paths.readers),
        "sources": _places(paths.sources),
        "shares": paths.shares.tolist(),
        "shares_by_branch": paths.by_branch.tolist(),
        "branch_shares": paths.branch_shares(),
        "mean_spans": paths.mean_spans(),
        "by_span": paths.by_span(),
        "longest": [
            {"source": u.name, "reader": v.name, "span": v.place - u.place, "share": share}
            for u, v, share in paths.longest(LONG_SPAN)
        ],
        "sum_error": paths.sum_error,
        "model_error": paths.model_error,
    }


def _places(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    return [{"name": block.name, "place": block.place} for block in blocks]


def _minus(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: a[name] - b[name] for name in a}
