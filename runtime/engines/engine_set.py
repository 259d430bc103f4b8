"""All graphs of a bundle in one engine, with their weights and states: what a model runner works with.

opened = open_engines("onnxruntime", folder, manifest, checkpoint, EngineOptions())
opened.engines["body"].run(feeds)
opened.close()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError, RequestError
from flashnext.export.graphs.manifest import Manifest
from flashnext.runtime.counts import check_threads
from flashnext.runtime.engines import open_engine
from flashnext.runtime.engines.base import Engine
from flashnext.runtime.mapped_files.files import MappedFiles
from flashnext.runtime.ngram import RowSource
from flashnext.runtime.ngram_memory import GATHERERS
from flashnext.runtime.states import allocate_states
from flashnext.runtime.weights import load_weights

TENSORRT = ("tensorrt", "tensorrt-rtx")
EXPERT_MEMORY = ("device", "host")


@dataclass(frozen=True)
class EngineOptions:
    """What some engines can be told; the others refuse it.

    Raises:
        RequestError: a value that is none.
    """

    threads: int | None = None
    """onnxruntime, torch: threads; their own choice when None."""
    engine_path: str | Path | None = None
    """tensorrt, tensorrt-rtx: the engine folder; BUNDLE/engines/<kind>-<target> for this GPU when None."""
    plugins: str | Path | None = None
    """tensorrt: the plugin library that the engine was built with, if `flashnext plugins path` is another one."""
    providers: Sequence[Any] | None = None
    """onnxruntime: execution providers, as names or (name, options) pairs; the CPU's when None."""
    expert_memory: str = "device"
    """tensorrt, tensorrt-rtx: where the experts' weights are: "device", or "host" (pinned, read over PCIe)."""

    ngram_gather: str = "host"
    """tensorrt: who hashes tokens and gathers their n-gram rows: "host", or "device" (from a pinned table: UVA)."""

    def __post_init__(self) -> None:
        check_threads(self.threads)
        for name, values in (("expert_memory", EXPERT_MEMORY), ("ngram_gather", GATHERERS)):
            if (given := getattr(self, name)) not in values:
                raise RequestError(f"{name} = {given!r:.40} must be one of {', '.join(values)}.")

    @classmethod
    def of(cls, **options: Any) -> EngineOptions:
        """Options by name.

        Raises:
            RequestError: there is none of that name.
        """
        names = [f.name for f in fields(cls)]
        if unknown := options.keys() - set(names):
            raise RequestError(f"There is no option {min(unknown)!r:.60}; engines have {', '.join(names)}.")
        return cls(**options)

    def check(self, kind: str) -> None:
        """Raise a RequestError if something was set that this kind of engine has no use for."""
        if kind != "onnxruntime" and self.providers:
            raise RequestError(f"providers are those of the engine onnxruntime; {kind} has none. Leave them out.")
        if kind != "tensorrt" and self.ngram_gather != "host":
            raise RequestError(
                f'ngram_gather = "{self.ngram_gather}" is for the engine tensorrt; {kind} takes rows from the host. '
                "Leave it out."
            )
        if kind not in TENSORRT:
            for name, default in (("engine_path", None), ("plugins", None), ("expert_memory", "device")):
                if getattr(self, name) != default:
                    raise RequestError(f"{name} is for the engines {' and '.join(TENSORRT)}, not for {kind}.")


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that an engine was built for."""

    sequences: int
    prompts: int
    """sequences in a step of more than W tokens each"""
    tokens: int
    """of each in such a step"""
    logit_rows: int

    def check_sequences(self, count: int) -> None:
        """Raise an EngineError if so many sequences cannot run at once."""
        if count > self.sequences:
            raise EngineError(
                f"{count} sequences are to run at once, and the engine was built for {self.sequences}. Ask for fewer, "
                "or build the engine for more: flashnext build --help."
            )


@dataclass(frozen=True)
class EngineSet:
    """Opened engines by graph, and the states by name: numpy arrays, or arrays on a device that are cut and copied
    like them. `limits`: None where any step can be run."""

    engines: Mapping[str, Engine]
    states: Mapping[str, Any]
    limits: StepLimits | None = None
    close: Callable[[], None] = lambda: None
    states_elsewhere: bool = False
    """The engines keep the states on a device, and `states` holds only what they were given."""
    row_sources: Mapping[str, RowSource] = field(default_factory=dict)
    """Who finds the n-gram rows, by the body's input, where the device does (`EngineOptions.ngram_gather`)."""


def open_engines(
    kind: str,
    bundle: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    options: EngineOptions | None = None,
    resident: bool = True,
) -> EngineSet:
    """Open every graph of a bundle and bind weights and states.

    Args:
        resident: let an engine on a device leave there what only other graphs take; else all outputs are numpy arrays.

    Raises:
        EngineError: unknown engine, not installed, or it does not fit.
        CheckpointError: a weight that is missing or cannot be read, or a file that is cut short meanwhile.
    """
    options = options or EngineOptions()
    options.check(kind)
    if kind in TENSORRT:
        from flashnext.runtime.engines.tensorrt.opening import open_bundle

        return open_bundle(kind, bundle, manifest, checkpoint, options, resident)
    states = allocate_states(manifest)
    engines = {}
    with MappedFiles.of(checkpoint):
        bound = {**load_weights(manifest, checkpoint), **states}
        for name, spec in manifest.graphs.items():
            engines[name] = open_engine(
                kind, name, bundle, manifest, checkpoint, options.threads, providers=options.providers
            )
            engines[name].bind({t.name: bound[t.name] for t in spec.inputs if t.role in ("weight", "state")})
    elsewhere = any(getattr(engine, "states_elsewhere", False) for engine in engines.values())
    return EngineSet(engines, states, states_elsewhere=elsewhere)
