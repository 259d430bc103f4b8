"""Builds one plan: the calls that TensorRT and TensorRT for RTX share, in their order.

network (strongly typed) <- parser <- bytes of the graph, external data from the checkpoint's folder
config <- profiles, settings of the kind (apis.py), progress
builder(network, config) -> plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashnext.builder.apis import Api
from flashnext.builder.engine_manifest import Range
from flashnext.builder.job import PlanJob
from flashnext.export.errors import BuildError

Report = Callable[[str, int, int], bool]
"""Told of the phase under way, its steps done and in all; False cancels the build."""
MAX_LOG_LINES = 200
SHOWN_ERRORS = 3


def build_plan(api: Api, job: PlanJob, report: Report) -> tuple[bytes, list[str]]:
    """Build the job's graph; the plan, and what TensorRT warned of.

    Raises:
        BuildError: the graph cannot be parsed or built; with what TensorRT logged.
    """
    log = make_log(api.trt)
    builder = api.trt.Builder(log)
    api.prepare(builder, job)
    network = builder.create_network(1 << int(api.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = api.trt.OnnxParser(network, log)
    # The path names the folder of the external data; there need not be such a file.
    if not parser.parse(Path(job.graph).read_bytes(), path=str(Path(job.weights) / "graph.onnx")):
        raise BuildError(f"{api.name} {api.version} cannot parse the graph of {job.plan}: {_parser_errors(parser)}")
    config = builder.create_builder_config()
    api.configure(config, job)
    for ranges in job.profiles:
        _add_profile(builder, config, ranges)
    if api.tells_progress:
        config.progress_monitor = make_monitor(api.trt, report)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise BuildError(f"{api.name} {api.version} cannot build {job.plan}: {_last_errors(log)}")
    plan = bytes(made)
    api.finish(config, job)
    return plan, log.lines


def _add_profile(builder: Any, config: Any, ranges: Mapping[str, Range]) -> None:
    profile = builder.create_optimization_profile()
    for name, shapes in ranges.items():
        profile.set_shape(name, shapes.min, shapes.opt, shapes.max)
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"The profile with the inputs {', '.join(ranges)} does not fit the graph.")


def make_log(trt: Any) -> Any:
    """A logger of TensorRT that keeps warnings and errors, in `lines`."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            if severity not in (trt.ILogger.INFO, trt.ILogger.VERBOSE) and len(self.lines) < MAX_LOG_LINES:
                self.lines.append(message)

    return Log()


def make_monitor(trt: Any, report: Report) -> Any:
    """A progress monitor of TensorRT that reports the outermost phases."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = num_steps
                report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return report(phase_name, step + 1, self.steps.get(phase_name, 0))

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self.steps:
                report(phase_name, self.steps[phase_name], self.steps.pop(phase_name))

    return Monitor()


def _parser_errors(parser: Any) -> str:
    errors = [parser.get_error(i) for i in range(min(parser.num_errors, SHOWN_ERRORS))]
    reasons = (f"{e.node_operator()} {e.node_name()}: {e.desc().strip()}"[:400] for e in errors)
    return "; ".join(reasons) or "no reason given"


def _last_errors(log: Any) -> str:
    return "; ".join(line.strip()[:400] for line in log.errors[-SHOWN_ERRORS:]) or "it was cancelled, or gave no reason"
