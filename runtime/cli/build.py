"""`flashnext build`: from a bundle to an engine of TensorRT. The work is done by `flashnext.builder`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from flashnext.export.errors import BuildError
from flashnext.export.progress import progress_bar
from flashnext.runtime.cli.parser import Commands, Parser, output_file, whole_number
from flashnext.runtime.cli.table import amount_of_bytes, render

if TYPE_CHECKING:
    from flashnext.builder.engine_manifest import EngineManifest
    from flashnext.builder.proposal import Proposal

DESCRIPTION = """\
Build the graphs of a bundle into an engine: a folder of plans and an engine.json that says what they are good for.
With tensorrt, custom nodes become plugins (flashnext plugins build makes the library) and the GPU has to be at hand.
With tensorrt-rtx, they become plain operators, and an engine for an RTX GPU is built on any machine. The folder
appears whole or not at all. Where a GPU is at hand, a golden prompt is compared before the engine is kept."""

EXAMPLES = """\
examples:
  flashnext build my-bundle                                      TensorRT, for this machine's GPU
  flashnext build my-bundle --engine tensorrt-rtx --target 120   for a GeForce RTX 5090 or RTX PRO 6000, without one
  flashnext build my-bundle --engine tensorrt-rtx --target 120 --dry-run    what would be built, and the memory
  flashnext build my-bundle --max-batch 2 --prefill-chunk 1024 --timing-cache timings.bin
"""

ENGINES = ("tensorrt", "tensorrt-rtx")
MAX_WORKSPACE_MB = 1 << 20
"""A terabyte: more than any device has, and a number that TensorRT can take."""


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "build", help="bundle to engine", description=DESCRIPTION, epilog=EXAMPLES, parents=parents
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder made by `flashnext export`")
    add = parser.add_argument
    add("--engine", choices=ENGINES, default=ENGINES[0], help="what builds (default: tensorrt)")
    target = "compute capability to build for, 120 for 12.0 (default: this machine's GPU); tensorrt-rtx takes several"
    add("--target", type=whole_number(1), nargs="+", default=(), metavar="SM", help=target)
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    _add_sizes(parser)
    _add_tensorrt(parser)
    add = parser.add_argument_group("writing").add_argument
    add("--out", metavar="FOLDER", help="folder of the engine (default: BUNDLE/engines/ENGINE-smTARGET)")
    add("--overwrite", action="store_true", help="replace an engine that is already there")
    add("--dry-run", action="store_true", help="check everything, print plans, profiles and memory, and build nothing")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _add_sizes(parser: Parser) -> None:
    workspace = "most that a layer may use on the device"
    add = parser.add_argument_group("sizes of steps").add_argument
    add("--max-batch", type=whole_number(1), default=0, metavar="N", help="texts decoded at once (default: every slot)")
    chunk = "tokens of a prompt in one step (default: 512, or the capacity)"
    add("--prefill-chunk", type=whole_number(1), default=0, metavar="TOKENS", help=chunk)
    add("--prefill-batch", type=whole_number(1), default=1, metavar="N", help="prompts in one step (default: 1)")
    add("--workspace", type=whole_number(0, MAX_WORKSPACE_MB), default=0, metavar="MB", help=workspace)


def _add_tensorrt(parser: Parser) -> None:
    add = parser.add_argument_group("of one engine only").add_argument
    add("--plugins", metavar="FILE", help="tensorrt: the plugin library (default: the one of this installation)")
    add(
        "--timing-cache",
        type=output_file,
        metavar="FILE",
        help="tensorrt: timings of kernels, read and written: later builds are fast",
    )
    hardware = "tensorrt: let the engine run on other GPUs from Ampere on, slower"
    add("--hardware-compatible", action="store_true", help=hardware)
    version = "tensorrt: let later releases of the same major version run the engine, slower"
    add("--version-compatible", action="store_true", help=version)
    inputs = "tensorrt-rtx: plans without weights, which are bound from the checkpoint: small plans, quick builds"
    add("--weights-as-inputs", action="store_true", help=inputs)


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from flashnext.builder.build import build_engine
    from flashnext.builder.proposal import check_memory
    from flashnext.runtime.engines.tensorrt.golden_prompt import find_check

    proposal = _proposal(arguments)
    if arguments.dry_run:
        print(json.dumps(proposal_facts(proposal), indent=1) if arguments.json else proposal_table(proposal))
        check_memory(proposal)
        return 0
    with progress_bar(None, "plans", delay=0) as bar:
        manifest = build_engine(
            proposal,
            golden=find_check(arguments.bundle, arguments.checkpoint, arguments.plugins),
            note=lambda line: _note(line, bar, getattr(arguments, "verbose", False)),
            progress=lambda what, done, steps: bar.set_description(f"{what} {done}/{steps}" if steps else what),
        )
    print(json.dumps(dataclasses.asdict(manifest), indent=1) if arguments.json else engine_table(manifest))
    print(f"flashnext: built {proposal.target} in {manifest.seconds:.1f} s", file=sys.stderr)
    print(f"flashnext: golden prompt: {manifest.golden_check}{_because(manifest)}", file=sys.stderr)
    return 0


def _note(line: str, bar: tqdm[NoReturn], verbose: bool) -> None:
    """TensorRT warns of much that is meant; who wants to read it asks for it."""
    if verbose:
        bar.write(f"flashnext: {line}", file=sys.stderr)


def _because(manifest: EngineManifest) -> str:
    return f" ({manifest.golden_note})" if manifest.golden_note else ""


def _proposal(arguments: argparse.Namespace) -> Proposal:
    from flashnext.builder.profiles import ProfileOptions
    from flashnext.builder.proposal import EngineOptions, propose
    from flashnext.export.graphs.manifest import Manifest
    from flashnext.runtime.model_runner import open_checkpoint

    manifest = Manifest.read(arguments.bundle)
    checkpoint = open_checkpoint(manifest, arguments.checkpoint)
    if len(set(arguments.target)) != len(arguments.target):
        raise BuildError(f"--target {' '.join(map(str, arguments.target))} names one twice. Name each once.")
    options = EngineOptions(
        kind=arguments.engine,
        targets=tuple(arguments.target),
        out=arguments.out,
        overwrite=arguments.overwrite,
        profile=ProfileOptions(arguments.max_batch, arguments.prefill_chunk, arguments.prefill_batch),
        weights_as_inputs=arguments.weights_as_inputs,
        plugins=arguments.plugins,
        timing_cache=arguments.timing_cache,
        hardware_compatible=arguments.hardware_compatible,
        version_compatible=arguments.version_compatible,
        workspace=arguments.workspace << 20,
    )
    return propose(Path(arguments.bundle), manifest, checkpoint.common_parent, options)


def proposal_facts(proposal: Proposal) -> dict[str, Any]:
    """The proposal as plain data."""
    return {
        "engine": proposal.options.kind,
        "target": str(proposal.target),
        "capabilities": proposal.capabilities,
        "gpu": proposal.gpu.name if proposal.gpu else "",
        "plugins": str(proposal.plugin_file or ""),
        "graphs": {name: [dataclasses.asdict(p) for p in plans] for name, plans in proposal.graphs.items()},
        "host_bytes": proposal.host_bytes,
        "disk_bytes": proposal.disk_bytes,
        "device_bytes": proposal.device_bytes,
    }


def proposal_table(proposal: Proposal) -> str:
    """The proposal for people."""
    rows = [
        [f"{plan.file} ({step})", _sizes(r), amount_of_bytes(plan.estimate.host), amount_of_bytes(plan.estimate.disk)]
        for plans in proposal.graphs.values()
        for plan in plans
        for step, r in plan.profiles.items()
    ]
    built_for = ", ".join(f"sm_{c}" for c in proposal.capabilities)
    return "\n".join(
        [
            f"{proposal.options.kind} for {built_for}, into {proposal.target}",
            "",
            render(["plan", "sequences x tokens", "memory to build", "on disk"], rows),
            "",
            f"A step binds at least {amount_of_bytes(proposal.device_bytes)} on the device.",
        ]
    )


def _sizes(ranges: Any) -> str:
    """Smallest to largest [B, S] of a profile."""
    found = next(r for r in ranges.values() if len(r.min) >= 2)
    return f"{found.min[0]}x{found.min[1]} … {found.max[0]}x{found.max[1]}"


def engine_table(manifest: EngineManifest) -> str:
    """The plans of an engine, and what building them took."""
    rows = [
        [plan.file, amount_of_bytes(plan.bytes), f"{plan.seconds:.1f}", amount_of_bytes(plan.peak_bytes)]
        for graph in manifest.graphs.values()
        for plan in graph.plans
    ]
    return render(["plan", "size", "seconds", "peak memory"], rows)
