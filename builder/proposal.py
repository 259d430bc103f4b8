"""What a build would do, all of it checked before the first plan is begun: `flashnext build --dry-run` prints it.

Everything that a user can have wrong is refused here: kind and target, plugin library, profiles, files of the bundle,
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from flashnext.builder import memory
from flashnext.builder.apis import NAMES, RTX_CAPABILITIES, one_plan
from flashnext.builder.engine_manifest import ENGINES_FOLDER, FILE_NAME, KINDS, PluginLibrary, Range, default_folder
from flashnext.builder.gpus import Gpu, find_gpu
from flashnext.builder.memory import Estimate
from flashnext.builder.profiles import ProfileOptions, Sizes, ranges, step_sizes
from flashnext.builder.source_graph import check_axes, read_graph, weight_bytes
from flashnext.export.errors import BuildError
from flashnext.export.graphs.manifest import GraphSpec, Manifest
from flashnext.export.ops import schema


@dataclass(frozen=True)
class EngineOptions:
    """Options of `flashnext build`.

    `targets` are compute capabilities (120 is 12.0): TensorRT for RTX builds for any of them, TensorRT for the GPU at
    hand. `out` is the engine's folder. `plugins` names a plugin library; without it the one of this installation is
    taken. `workspace` bounds what one layer may use on the device, in bytes.
    """

    kind: str
    targets: tuple[int, ...] = ()
    out: str | Path | None = None
    overwrite: bool = False
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    weights_as_inputs: bool = False
    plugins: str | Path | None = None
    timing_cache: str | Path | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    workspace: int = 0


@dataclass(frozen=True)
class ProposedPlan:
    """A plan to build: its file, the kinds of steps that it takes with their ranges, and an estimate."""

    file: str
    profiles: Mapping[str, Mapping[str, Range]]
    estimate: Estimate


@dataclass(frozen=True)
class Proposal:
    """Everything that a build needs to know; `graphs` lists the plans of each graph."""

    bundle: Path
    weights: Path
    """Folder that the graphs' external data lies in."""
    manifest: Manifest
    options: EngineOptions
    target: Path
    capabilities: tuple[int, ...]
    gpu: Gpu | None
    plugins: PluginLibrary | None
    plugin_file: Path | None
    graphs: Mapping[str, tuple[ProposedPlan, ...]]

    @property
    def host_bytes(self) -> int:
        """Plans are built one after the other."""
        return max(plan.estimate.host for plans in self.graphs.values() for plan in plans)

    @property
    def disk_bytes(self) -> int:
        return sum(plan.estimate.disk for plans in self.graphs.values() for plan in plans)

    @property
    def device_bytes(self) -> int:
        return max(plan.estimate.device for plans in self.graphs.values() for plan in plans)


def propose(bundle: str | Path, manifest: Manifest, weights: Path, options: EngineOptions) -> Proposal:
    """What building this bundle's engine would do.

    Args:
        weights: the real folder above all of the checkpoint's files (`Checkpoint.common_parent`).

    Raises:
        BuildError: it cannot be done; says what to change.
        BundleError: a graph was changed, or weights lie elsewhere.
        PluginError: there is no plugin library for this GPU and these ops.
    """
    if options.kind not in KINDS:
        raise BuildError(f"--engine {options.kind} is not one of {', '.join(KINDS)}.")
    gpu = find_gpu()
    capabilities = _capabilities(options, gpu)
    plugins, plugin_file = _plugins(options, capabilities) if options.kind == "tensorrt" else (None, None)
    sizes = step_sizes(manifest, options.profile)
    graphs = {
        name: tuple(_plans(name, spec, read_graph(Path(bundle), spec), manifest, weights, options, sizes))
        for name, spec in manifest.graphs.items()
    }
    target = Path(options.out) if options.out else default_folder(bundle, options.kind, capabilities)
    _check_target(target, options.overwrite)
    made_for = (target, capabilities, gpu, plugins, plugin_file)
    return Proposal(Path(bundle), weights, manifest, options, *made_for, graphs)


def check_memory(proposal: Proposal) -> None:
    """Raise a BuildError where host, disk or GPU have less room than the build is estimated to take."""
    for plans in proposal.graphs.values():
        for plan in plans:
            memory.check_host(plan.file, plan.estimate.host)
    folder = next(p for p in (proposal.target.absolute(), *proposal.target.absolute().parents) if p.exists())
    memory.check_disk(folder, proposal.disk_bytes)
    if proposal.gpu and proposal.gpu.capability in proposal.capabilities:
        memory.check_device(proposal.gpu.name, proposal.device_bytes, proposal.gpu.free_bytes)


def _plans(
    name: str,
    spec: GraphSpec,
    graph: bytes,
    manifest: Manifest,
    weights: Path,
    options: EngineOptions,
    sizes: Mapping[str, Sizes],
) -> list[ProposedPlan]:
    """The plans of one graph: one for all kinds of steps, or one each."""
    model = onnx.load_model_from_string(graph)
    check_axes(model)
    held = 0 if options.weights_as_inputs else weight_bytes(graph, manifest, weights)
    custom = sum(n.domain == schema.DOMAIN for n in model.graph.node)
    each = {step: ranges(spec, values) for step, values in sizes.items()}
    largest = {step: {d: bounds[2] for d, bounds in values.items()} for step, values in sizes.items()}
    needed = {step: memory.estimate(spec, held, custom, values) for step, values in largest.items()}
    if options.kind == "tensorrt-rtx":
        needed["decode"] = memory.with_gathered(needed["decode"], manifest, largest["decode"])
    if one_plan(options.kind):
        return [ProposedPlan(f"{name}.plan", each, max(needed.values(), key=lambda e: e.device))]
    return [ProposedPlan(f"{name}.{step}.plan", {step: each[step]}, needed[step]) for step in each]


# --- what is refused --------------------------------------------------------------------------------------------------


def _capabilities(options: EngineOptions, gpu: Gpu | None) -> tuple[int, ...]:
    name = NAMES[options.kind]
    if options.kind == "tensorrt-rtx":
        return _rtx_capabilities(options, gpu)
    if gpu is None:
        raise BuildError(
            f"{name} builds for the GPU at hand, and none answers here (nvidia-smi). Build on the machine that will "
            "run the engine; for an RTX GPU, --engine tensorrt-rtx builds without one."
        )
    if options.targets and options.targets != (gpu.capability,):
        raise BuildError(
            f"{name} builds for the GPU at hand, which is sm_{gpu.capability}, not for --target "
            f"{' '.join(map(str, options.targets))}. Leave --target out, or build on such a GPU."
        )
    if options.weights_as_inputs:
        raise BuildError(f"--weights-as-inputs is about --engine tensorrt-rtx; plans of {name} hold dense weights.")
    return (gpu.capability,)


def _rtx_capabilities(options: EngineOptions, gpu: Gpu | None) -> tuple[int, ...]:
    name = NAMES[options.kind]
    given = {
        "--plugins": options.plugins,
        "--timing-cache": options.timing_cache,
        "--hardware-compatible": options.hardware_compatible,
        "--version-compatible": options.version_compatible,
    }
    if misplaced := [option for option, value in given.items() if value]:
        raise BuildError(f"{misplaced[0]} is about --engine tensorrt; {name} has nothing of the kind. Leave it out.")
    targets = options.targets or ((gpu.capability,) if gpu else ())
    if not targets:
        raise BuildError(
            f"No GPU answers here (nvidia-smi), so {name} has to be told what to build for: --target 120, for example "
            f"(one or more of {', '.join(map(str, RTX_CAPABILITIES))})."
        )
    if unknown := [t for t in targets if t not in RTX_CAPABILITIES]:
        raise BuildError(
            f"{name} does not build for sm_{unknown[0]}, only for {', '.join(f'sm_{c}' for c in RTX_CAPABILITIES)}. "
            "Name one of these with --target, or build with --engine tensorrt on that GPU."
        )
    return tuple(sorted(set(targets)))


def _plugins(options: EngineOptions, capabilities: tuple[int, ...]) -> tuple[PluginLibrary, Path]:
    from flashnext.plugins.tensorrt import library

    (capability,) = capabilities
    found = library.check(options.plugins) if options.plugins else library.find(str(capability))
    if not found.runs_on(str(capability)):
        built_for = ", ".join(f"sm_{c}" for c in found.capabilities) or "the host alone"
        raise BuildError(
            f"The plugin library {found.path} was built for {built_for}, and this GPU is sm_{capability}. Build one "
            f"for it: flashnext plugins build --target {capability}"
        )
    about = (found.sha256, found.op_version, found.op_table, found.tensorrt_headers, tuple(found.capabilities))
    return PluginLibrary(*about), found.path.resolve()


def _check_target(target: Path, overwrite: bool) -> None:
    above = target.absolute().parent
    is_made = above.name == ENGINES_FOLDER and above.parent.is_dir() and not above.exists()  # BUNDLE/engines
    if not (above.is_dir() or is_made):
        raise BuildError(f"{above} is no folder; make it first, or name another folder for the engine with --out.")
    if target.exists() and not target.is_dir():
        raise BuildError(f"{target} is a file; name a folder for the engine with --out.")
    if target.is_dir() and any(target.iterdir()):
        if not (target / FILE_NAME).is_file():
            raise BuildError(f"{target} holds files that are not an engine; name another folder with --out.")
        if not overwrite:
            raise BuildError(f"{target} holds an engine already; add --overwrite to replace it, or name another --out.")
