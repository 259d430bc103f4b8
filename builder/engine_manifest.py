"""The engine folder and its `engine.json`: which plans there are, what they were made from, what steps they take.

    BUNDLE/engines/tensorrt-sm90/          or wherever `flashnext build --out` says
        engine.json                        this module
        head.plan, body.plan, …            TensorRT: one plan for a graph, with a profile for each kind of step
        body.decode.plan, body.prefill.plan    TensorRT for RTX: a plan for each kind of step

An engine is good for one bundle, one release of TensorRT, one kind of GPU and (with plugins) one plugin library.
`engine.json` names them all, so that a mismatch is a sentence and not a crash. It is plain data, read without
TensorRT, PyTorch or ONNX, and comes from strangers: `EngineManifest.read` checks types, sizes and that no file leaves
the folder; `read_plan` checks a plan's length and hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from flashnext.export.errors import EngineError
from flashnext.export.files import open_regular, plain
from flashnext.export.graphs.manifest import FILE_NAME as BUNDLE_MANIFEST
from flashnext.export.graphs.manifest import MAX_MANIFEST_BYTES
from flashnext.export.versioned_json import VersionedJson

FORMAT_VERSION = 1
FILE_NAME = "engine.json"
ENGINES_FOLDER = "engines"
KINDS = ("tensorrt", "tensorrt-rtx")
STEPS = ("decode", "prefill")
"""Kinds of steps: those with at most W tokens a sequence (decode, verification), and longer ones (prefill)."""
NOT_RUN, PASSED = "not run", "passed"
FILE = VersionedJson("an engine's manifest", FORMAT_VERSION, 16 << 20, EngineError, "Build the engine again.")
MAX_DIMENSIONS = 8
VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,4}")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """Shapes that one dynamic input may take: smallest, the one to be fastest at, largest."""

    min: Shape
    opt: Shape
    max: Shape

    def holds(self, shape: Shape) -> bool:
        """Whether a shape lies between the smallest and the largest."""
        sides = zip(self.min, shape, self.max, strict=False)
        return len(shape) == len(self.min) and all(low <= size <= high for low, size, high in sides)


@dataclass(frozen=True)
class Profile:
    """One kind of step: which plan of the graph takes it, the profile's index there, the ranges of dynamic inputs."""

    name: str
    plan: str
    index: int
    ranges: Mapping[str, Range]

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether a step with inputs of these shapes (others are ignored) can be run with this profile."""
        return all(r.holds(shapes[name]) for name, r in self.ranges.items() if name in shapes)


@dataclass(frozen=True)
class Plan:
    """A file with a serialized engine; building it took `seconds`, of a processor `processor_seconds`, and `peak_bytes`
    of host memory."""

    file: str
    sha256: str
    bytes: int
    seconds: float = 0.0
    processor_seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class EngineGraph:
    """One graph of the bundle. Names, dtypes and shapes of its inputs and outputs are those of the bundle's manifest.

    `weights` are bound once: the bundle's weight inputs, and with `--weights-as-inputs` tensors of the checkpoint by
    their names there.

    `codes` are inputs and outputs that hold 8-bit codes as another dtype than in the bundle's graph. The bytes are the
    same: E4M3 codes as "float8_e4m3fn", packed E2M1 codes as "int8", or, for TensorRT for RTX, four of either as one
    "int32", with a fourth of the columns.

    `states` maps each state input to the output that holds it after the step. With `in_place` both are bound to one
    address; without, a plan reads one buffer and writes another, and the two change roles from step to step.
    """

    plans: tuple[Plan, ...]
    profiles: tuple[Profile, ...]
    weights: tuple[str, ...]
    states: Mapping[str, str]
    in_place: bool
    codes: Mapping[str, str] = field(default_factory=dict)

    def profile_for(self, shapes: Mapping[str, Shape]) -> Profile | None:
        """The first profile that takes inputs of these shapes."""
        return next((p for p in self.profiles if p.takes(shapes)), None)


@dataclass(frozen=True)
class PluginLibrary:
    """The plugin library that the plans were built with: no other one may run them."""

    sha256: str
    op_version: int
    op_table: str
    """Digest of the ops' table that it was made from."""
    headers: str
    """Version of the TensorRT headers that it was compiled with."""
    capabilities: tuple[str, ...]
    """As nvcc writes them: "90a"."""


@dataclass(frozen=True)
class EngineManifest:
    """Everything that the runtime needs to know about an engine folder besides the plans themselves."""

    kind: str
    """"tensorrt" or "tensorrt-rtx"."""
    tensorrt: str
    """Version of TensorRT (or TensorRT for RTX) that built the plans: another one cannot load them."""
    capabilities: tuple[int, ...]
    """Compute capabilities of the GPUs that the plans are for: 90 is 9.0."""
    gpu: str
    """The GPU that the plans were timed on; "" where they were built without one."""
    bundle: str
    """SHA-256 of the bundle's manifest.json."""
    checkpoint: str
    """Identity of the checkpoint."""
    graphs: Mapping[str, EngineGraph]
    plugins: PluginLibrary | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    golden_check: str = NOT_RUN
    """Whether a golden prompt was compared after the build: "passed" or "not run"."""
    golden_note: str = ""
    """Why it was not run, or what was compared."""
    seconds: float = 0.0
    producer: str = ""
    format_version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Write `engine.json` into the folder."""
        (folder / FILE_NAME).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | Path) -> EngineManifest:
        """Read and check an engine folder's manifest.

        Raises:
            EngineError: no manifest, another format version, a wrong type, or a file outside the folder.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise EngineError(f"{folder} holds no engine (no {FILE_NAME}). Build one with: flashnext build BUNDLE")
        raw = FILE.read(path)
        with FILE.parsing(path):
            manifest = _from_raw(raw)
        if fault := next(_faults(manifest, path.parent), ""):
            raise EngineError(f"{path} cannot be used: {fault}. {FILE.remedy}")
        return manifest

    def check_bundle(self, bundle: str | Path, folder: str | Path) -> None:
        """Raise an EngineError unless the engine in `folder` was built from the bundle as it is now."""
        found = bundle_identity(bundle)
        if found != self.bundle:
            raise EngineError(
                f"The engine at {folder} was built from another bundle than {bundle} (its manifest has the hash "
                f"{found:.12}…, the engine's {self.bundle:.12}…). Build it again: flashnext build {bundle} "
                f"--engine {self.kind}"
            )

    def check_version(self, found: str, folder: str | Path) -> None:
        """Raise an EngineError unless TensorRT of version `found` can load the plans."""
        if found == self.tensorrt:
            return
        old, new = (tuple(map(int, v.split(".")[:2])) for v in (self.tensorrt, found))
        if self.version_compatible and old[0] == new[0] and new >= old:
            return
        name = "TensorRT for RTX" if self.kind == "tensorrt-rtx" else "TensorRT"
        raise EngineError(
            f"The engine at {folder} was built by {name} {self.tensorrt}, and {found} is installed, which cannot load "
            f"it. Build it again, or install {self.tensorrt}."
        )

    def check_capability(self, capability: int, folder: str | Path) -> None:
        """Raise an EngineError unless a GPU of this compute capability (90 is 9.0) can run the plans."""
        newest = max(self.capabilities)
        if capability in self.capabilities or (self.hardware_compatible and capability >= newest):
            return
        built_for = ", ".join(f"sm_{c}" for c in self.capabilities)
        raise EngineError(
            f"The engine at {folder} was built for {built_for}, and this GPU is sm_{capability}. "
            "Build it again on this GPU (or with --target for it)."
        )


def default_folder(bundle: str | Path, kind: str, capabilities: tuple[int, ...]) -> Path:
    """Where an engine goes unless the user says otherwise: BUNDLE/engines/tensorrt-sm90."""
    target = "-".join(f"sm{c}" for c in capabilities)
    return Path(bundle) / ENGINES_FOLDER / f"{kind}-{target}"


def bundle_identity(bundle: str | Path) -> str:
    """SHA-256 of a bundle's manifest, which holds the hashes of its graphs.

    Raises:
        EngineError: it cannot be read.
    """
    path = Path(bundle) / BUNDLE_MANIFEST
    try:
        with open_regular(path) as stream:
            content = stream.read(MAX_MANIFEST_BYTES + 1)
    except OSError as cause:
        raise EngineError(f"{path} cannot be read ({cause.strerror or cause}); expected a bundle's manifest.") from None
    return hashlib.sha256(content).hexdigest()


def read_plan(folder: str | Path, plan: Plan) -> bytes:
    """The bytes of a plan, as they were when it was built.

    Raises:
        EngineError: the file is missing, cannot be read, or has changed since.
    """
    path = Path(folder) / plan.file
    try:
        with open_regular(path) as stream:
            content = _exactly(stream, plan.bytes)
    except OSError as cause:
        raise EngineError(f"{path} cannot be read ({cause.strerror or cause}). Build the engine again.") from None
    if hashlib.sha256(content).hexdigest() != plan.sha256:
        raise EngineError(f"{path} has changed since it was built (its hash is another). Build the engine again.")
    return content


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = os.fstat(stream.fileno()).st_size
    if found != size:
        raise OSError(None, f"it is {found:,} bytes long, and was built with {size:,}")
    return stream.read(size)


# --- reading ----------------------------------------------------------------------------------------------------------


def _faults(manifest: EngineManifest, folder: Path) -> Iterator[str]:
    if manifest.kind not in KINDS:
        yield f"its kind is {manifest.kind!r:.40}, not one of {', '.join(KINDS)}"
    if not manifest.capabilities:
        yield "it names no compute capability"
    if manifest.golden_check not in (NOT_RUN, PASSED):
        yield f"its golden check is {manifest.golden_check!r:.40}"
    if not VERSION.fullmatch(manifest.tensorrt):
        yield f"{manifest.tensorrt!r:.40} is not a version of TensorRT"
    for name, graph in manifest.graphs.items():
        yield from _graph_faults(plain(name), graph, folder)


def _graph_faults(name: str, graph: EngineGraph, folder: Path) -> Iterator[str]:
    files = [plan.file for plan in graph.plans]
    for file in files:
        if Path(file).name != file or file in ("", ".", "..") or not file.isprintable():
            yield f"it names the file {file!r:.200}, but an engine's files lie in its own folder"
        elif not os.path.isfile(folder / file):
            yield f"{folder} lacks {plain(file)}"
        elif (folder / file).resolve().parent != folder.resolve():
            yield f"{file} is a link that leaves the engine's folder"
    for profile in graph.profiles:
        if profile.plan not in files or profile.name not in STEPS:
            yield f"the graph {name} has the profile {profile.name!r:.40} of the plan {profile.plan!r:.80}"
        yield from (f"the range of {plain(n)} in the graph {name} is {r!s:.200}" for n, r in _bad_ranges(profile))
    if not graph.profiles:
        yield f"the graph {name} has no profile"


def _bad_ranges(profile: Profile) -> Iterator[tuple[str, Range]]:
    for name, r in profile.ranges.items():
        same_rank = len(r.min) == len(r.opt) == len(r.max) <= MAX_DIMENSIONS
        if not same_rank or not r.holds(r.opt) or not r.holds(r.min) or any(d < 1 for d in r.min):
            yield name, r


def _from_raw(raw: Mapping[str, Any]) -> EngineManifest:
    plugins = raw["plugins"]
    texts = ("kind", "tensorrt", "gpu", "bundle", "checkpoint", "golden_check", "golden_note", "producer")
    plain: dict[str, Any] = {name: _text(raw[name]) for name in texts}
    return EngineManifest(
        **plain,
        hardware_compatible=_flag(raw["hardware_compatible"]),
        version_compatible=_flag(raw["version_compatible"]),
        capabilities=_whole_numbers(raw["capabilities"]),
        graphs={_text(name): _graph(graph) for name, graph in raw["graphs"].items()},
        plugins=None if plugins is None else _plugins(plugins),
        seconds=_seconds(raw["seconds"]),
    )


def _graph(raw: Mapping[str, Any]) -> EngineGraph:
    return EngineGraph(
        plans=tuple(_plan(p) for p in raw["plans"]),
        profiles=tuple(_profile(p) for p in raw["profiles"]),
        weights=tuple(map(_text, raw["weights"])),
        states=_texts(raw["states"]),
        in_place=_flag(raw["in_place"]),
        codes=_texts(raw["codes"]),
    )


def _plan(raw: Mapping[str, Any]) -> Plan:
    took = _seconds(raw["seconds"]), _seconds(raw["processor_seconds"]), _whole(raw["peak_bytes"])
    return Plan(_text(raw["file"]), _text(raw["sha256"]), _whole(raw["bytes"]), *took)


def _profile(raw: Mapping[str, Any]) -> Profile:
    ranges = {
        _text(name): Range(*(_whole_numbers(r[k]) for k in ("min", "opt", "max"))) for name, r in raw["ranges"].items()
    }
    return Profile(_text(raw["name"]), _text(raw["plan"]), _whole(raw["index"]), ranges)


def _plugins(raw: Mapping[str, Any]) -> PluginLibrary:
    texts = {name: _text(raw[name]) for name in ("sha256", "op_table", "headers")}
    capabilities = tuple(map(_text, raw["capabilities"]))
    return PluginLibrary(**texts, op_version=_whole(raw["op_version"]), capabilities=capabilities)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.60}")
    return value


def _texts(value: Any) -> dict[str, str]:
    return {_text(a): _text(b) for a, b in value.items()}


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise TypeError(f"expected a whole number, found {value!r:.60}")
    return value


def _whole_numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r:.60}")
    return tuple(map(_whole, value))


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TypeError(f"expected seconds, found {value!r:.60}")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {value!r:.60}")
    return value
