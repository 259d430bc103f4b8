"""Engine folders for tests: what `flashnext build` leaves, with plans that onnxruntime_plans.py runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onnxruntime_plans import VERSION

from flashnext.builder.engine_manifest import (
    EngineGraph,
    EngineManifest,
    Plan,
    PluginLibrary,
    Profile,
    Range,
    bundle_identity,
)
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.plugins.tensorrt.library import LibraryInfo, source_digest
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.shapes import plan_form

Machine = Callable[..., HostDevice]
"""The fixture `machine`."""
CHUNK = 48
"""Most tokens of a prefill step."""
PLUGINS = PluginLibrary("a" * 64, 1, "table", "10.14", ("90",))
"""What an engine with `plugins` says that it was built with."""


def library_info(path: Path, sources: str = "") -> LibraryInfo:
    """What is said of a library of the kernels' host execution in a plugin library's place."""
    info = (path, PLUGINS.sha256, PLUGINS.op_version, PLUGINS.op_table, PLUGINS.headers, PLUGINS.capabilities)
    return LibraryInfo(*info, sources or source_digest())


def write_engine(
    bundle: Path, kind: str = "tensorrt", plan: Mapping[str, Any] | None = None, sequences: int = 3, **changes: Any
) -> Path:
    """Write the engine of a bundle: one plan a graph and states in place ("tensorrt"), or two and states that change
    buffers ("tensorrt-rtx"). `plan` adds to the plans, `changes` replace fields of the manifest; `sequences`: B."""
    manifest = Manifest.read(bundle)
    folder = bundle / f"engines/{kind}-sm90"
    folder.mkdir(parents=True, exist_ok=True)
    graphs = {
        name: _graph(folder, bundle, manifest, name, kind, dict(plan or {}), sequences) for name in manifest.graphs
    }
    fields: dict[str, Any] = {
        "kind": kind,
        "tensorrt": VERSION,
        "capabilities": (90,),
        "gpu": "",
        "bundle": bundle_identity(bundle),
        "checkpoint": manifest.checkpoint.identity,
        "graphs": graphs,
    }
    EngineManifest(**fields | changes).write(folder)
    return folder


def _graph(
    folder: Path, bundle: Path, manifest: Manifest, name: str, kind: str, plan: dict[str, Any], sequences: int
) -> EngineGraph:
    spec, in_place = manifest.graphs[name], kind == "tensorrt"
    ranges = {step: _ranges(spec, manifest.window, step, sequences, in_place) for step in ("decode", "prefill")}
    if name == "mtp_draft":
        del ranges["prefill"]
    files = {f"{name}.plan": list(ranges)} if in_place else {f"{name}.{step}.plan": [step] for step in ranges}
    plans, profiles, codes = [], [], _codes(spec, in_place)
    extra = plan.get("extra", {}).get(name, [])
    fixed = {"bundle": str(bundle), "graph": name, "in_place": in_place, "codes": codes}
    for file, steps in files.items():
        shapes = [{n: (r.min, r.opt, r.max) for n, r in ranges[step].items()} for step in steps]
        text = json.dumps({**fixed, "profiles": shapes} | plan | {"extra": extra})
        (folder / file).write_text(text)
        plans.append(Plan(file, hashlib.sha256(text.encode()).hexdigest(), len(text.encode())))
        profiles += [Profile(step, file, index, ranges[step]) for index, step in enumerate(steps)]
    weights = tuple(weight for weight, _, _ in extra)
    return EngineGraph(tuple(plans), tuple(profiles), weights, dict(spec.states), in_place, codes)


def _codes(spec: GraphSpec, in_place: bool) -> dict[str, str]:
    """What holds 8-bit codes, and as what a plan has it: a dtype that plugins may have, or words of four."""
    names = [t.name for t in (*spec.inputs, *spec.outputs) if t.dtype in ("uint8", "float8_e4m3fn")]
    return dict.fromkeys(names, "float8_e4m3fn" if in_place else "int32")


def _ranges(spec: GraphSpec, window: int, step: str, sequences: int, in_place: bool) -> dict[str, Range]:
    decode = {"B": (1, 1, sequences), "S": (1, 1, window), "N": (1, 1, sequences * window)}
    prefill = {"B": (1, 1, 1), "S": (window + 1, CHUNK, CHUNK), "N": (1, 1, CHUNK)}
    sizes = decode if step == "decode" else prefill
    codes = _codes(spec, in_place)
    return {
        t.name: Range(*(tuple(sizes[d][i] if isinstance(d, str) else d for d in shape) for i in range(3)))
        for t, shape in ((t, plan_form(t, codes)[1]) for t in spec.inputs)
        if any(isinstance(d, str) for d in shape)
    }
