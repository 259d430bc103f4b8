"""Whether an engine folder can be used: for this bundle, by this TensorRT, on this GPU, in its memory.

Each mismatch is a sentence with the remedy, said before memory is taken. What a folder says of itself comes from
strangers, so it is held to the bundle first (`faults`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flashnext.builder.engine_manifest import ENGINES_FOLDER, FILE_NAME, EngineGraph, EngineManifest, Profile
from flashnext.export.errors import EngineError, PluginError
from flashnext.export.files import plain
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.tensorrt import weight_stream
from flashnext.runtime.engines.tensorrt.device import Device
from flashnext.runtime.engines.tensorrt.engine import output_bytes
from flashnext.runtime.engines.tensorrt.plan import Library, Plan
from flashnext.runtime.engines.tensorrt.shapes import limits, most_bytes, plan_form
from flashnext.runtime.states import bytes_per_slot

if TYPE_CHECKING:
    from flashnext.plugins.tensorrt.library import LibraryInfo

CODE_DTYPES = ("float8_e4m3fn", "int8", "uint8", "int32")
"""What a plan may have 8-bit codes as."""


def find_engine(
    kind: str, bundle: Path, capability: int, engine_path: str | Path | None = None
) -> tuple[Path, EngineManifest]:
    """The engine folder for a GPU, and what it says of itself.

    Raises:
        EngineError: there is none.
    """
    if engine_path is not None:
        return Path(engine_path), EngineManifest.read(engine_path)
    folders = sorted(path.parent for path in (bundle / ENGINES_FOLDER).glob(f"{kind}-*/{FILE_NAME}"))
    if not folders:
        raise EngineError(
            f"There is no {kind} engine of {bundle}. Build one with: flashnext build {bundle} --engine {kind}"
        )
    found = [(folder, EngineManifest.read(folder)) for folder in folders]
    fitting = (pair for pair in found if capability in pair[1].capabilities)
    return next(fitting, found[0])  # the first one's sentence says what it was built for


def check_fits(
    folder: Path,
    built: EngineManifest,
    kind: str,
    bundle: Path,
    manifest: Manifest,
    library: Library,
    device: Device,
) -> None:
    """Raise an EngineError unless the engine in `folder` can be used for this bundle, here."""
    again = f"Build it again: flashnext build {bundle} --engine {kind}"
    if built.kind != kind:
        raise EngineError(f"{folder} holds a {built.kind} engine, not one of {kind}: choose --engine {built.kind}.")
    built.check_bundle(bundle, folder)
    if built.checkpoint != manifest.checkpoint.identity:
        raise EngineError(f"The engine at {folder} was built from another checkpoint than {bundle}'s. {again}")
    built.check_version(library.version, folder)
    built.check_capability(device.capability, folder)
    if fault := next(faults(built, manifest), ""):
        raise EngineError(f"The engine at {folder} cannot be used: {fault}. {again}")


def faults(built: EngineManifest, manifest: Manifest) -> Iterator[str]:
    """What an engine's manifest says that cannot be true of this bundle's graphs."""
    for name, spec in manifest.graphs.items():
        if name not in built.graphs:
            yield f"it lacks the graph {name}"
            continue
        graph = built.graphs[name]
        if "decode" not in {profile.name for profile in graph.profiles}:
            yield f"the graph {name} has no decode profile"
        for profile in graph.profiles:
            where = f"in the {profile.name} profile of {name}"
            yield from (f"{fault}, {where}" for fault in _range_faults(spec, profile))
        tensors = {t.name: t for t in (*spec.inputs, *spec.outputs)}
        for tensor, dtype in graph.codes.items():
            known = tensor in tensors and numpy_dtype(tensors[tensor].dtype).itemsize == 1
            if dtype not in CODE_DTYPES or not known:
                yield f"{plain(tensor)} in {name} cannot hold codes as {plain(dtype)}"


def _range_faults(spec: GraphSpec, profile: Profile) -> Iterator[str]:
    """Ranges that are absent or of other axes than the graph's."""
    for tensor in spec.inputs:
        found = profile.ranges.get(tensor.name)
        if found is not None and len(found.min) != len(tensor.shape):
            yield f"the range of {tensor.name} has {len(found.min)} axes"
    named = {d for t in (*spec.inputs, *spec.outputs) for d in t.shape if isinstance(d, str)}
    sizes = limits(spec, profile)
    yield from (f"it says nothing of the size {name}" for name in sorted(named - sizes.keys()))
    yield from (f"the ranges of {name} exclude one another" for name, (low, high) in sizes.items() if low > high)


def find_plugins(folder: Path, sha256: str, capability: int, named: str | Path | None = None) -> LibraryInfo:
    """The plugin library that an engine was built with: the one that is named, or that of this installation.

    Raises:
        EngineError: there is none, or another one.
    """
    from flashnext.plugins.tensorrt import library

    try:
        found = library.check(named) if named else library.find(str(capability))
    except PluginError as missing:
        raise EngineError(
            f"The engine at {folder} needs the plugin library that it was built with. {missing}"
        ) from None
    if found.sha256 != sha256:
        raise EngineError(
            f"The engine at {folder} was built with another plugin library (SHA-256 {sha256:.12}…) than {found.path} "
            f"({found.sha256:.12}…). Name its own with --plugins (or ${library.VARIABLE}), or build the engine again."
        )
    return found


def differences(plan: Plan, spec: GraphSpec, graph: EngineGraph) -> Iterator[str]:
    """What a plan's inputs and outputs have otherwise than the bundle's graph (other capacity, other slots, …)."""
    wanted = {t.name: (True, *plan_form(t, graph.codes)) for t in spec.inputs}
    wanted |= {t.name: (False, *plan_form(t, graph.codes)) for t in spec.outputs}
    found = {name: tensor for name, tensor in plan.tensors().items() if name in wanted or name not in graph.weights}
    # A plan may lack an input that nothing in it reads; lengths, for example, in a graph without what they are for.
    needed = wanted.keys() - {t.name for t in spec.inputs if t.role == "step"}
    yield from (f"it lacks {name}" for name in wanted if name in needed and name not in found)
    yield from (f"it takes {name} from the host" for name in sorted(plan.host_tensors()))
    for name, (is_input, dtype, shape) in found.items():
        if name not in wanted:
            yield f"it has {name}, which the graph has not"
            continue
        sizes = tuple(-1 if isinstance(d, str) else d for d in wanted[name][2])
        # A plan may have a fixed size where the bundle's graph has a name: one sequence in prefill, for example.
        same = len(shape) == len(sizes) and all(a == b or b == -1 for a, b in zip(shape, sizes, strict=True))
        if (is_input, dtype) != wanted[name][:2] or not same:
            yield f"its {name} is {dtype} {list(shape)}, the graph's {wanted[name][1]} {list(sizes)}"


def check_memory(
    device: Device, folder: Path, manifest: Manifest, graphs: Mapping[str, EngineGraph], experts_in_host: bool
) -> None:
    """Raise an EngineError if weights, states, plans and buffers together cannot fit.

    A plan's weights are about as large as its file; scratch memory is known once plans are loaded (`Session.settle`).
    """
    weights = {w.name: math.prod(w.shape) * numpy_dtype(w.dtype).itemsize for w in manifest.weights}
    experts = sum(weights[w.name] for w in manifest.weights if weight_stream.is_expert(w))
    in_place = all(graph.in_place for graph in graphs.values())
    state_bytes = bytes_per_slot(manifest) * (manifest.slots + 1)
    buffers = sum(_edge_bytes(manifest.graphs[name], graph) for name, graph in graphs.items())
    parts = {
        "weights": sum(weights.values()) - (experts if experts_in_host else 0),
        "states": state_bytes * (1 if in_place else 2),
        "plans": sum(plan.bytes for graph in graphs.values() for plan in graph.plans),
        "inputs and outputs": buffers,
    }
    needed, free = sum(parts.values()), device.free_bytes()
    if needed > free:
        shares = ", ".join(f"{what} {nbytes / 1e9:.2f}" for what, nbytes in parts.items())
        hint = "" if experts_in_host or not experts else " Or keep the experts in host memory: --expert-memory host."
        raise EngineError(
            f"The engine at {folder} needs {needed / 1e9:.2f} GB of device memory ({shares}), and {free / 1e9:.2f} GB "
            f"of the {device.name} are free. Export the bundle with fewer --slots or less --capacity.{hint}"
        )


def _edge_bytes(spec: GraphSpec, graph: EngineGraph) -> int:
    """What a graph's inputs and outputs of a step take on the device."""
    inputs = sum(most_bytes(t, spec, graph) for t in spec.inputs if t.role not in ("weight", "state"))
    return inputs + sum(output_bytes(t, spec, graph) for t in spec.outputs if t.role != "state")
