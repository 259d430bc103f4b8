"""`flashnext plugins`: builds the TensorRT plugin library, says where it is and what a library file is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from flashnext.export.errors import PluginError
from flashnext.plugins.device_library import gpu_target
from flashnext.plugins.tensorrt import library
from flashnext.plugins.tensorrt.headers import find_headers
from flashnext.plugins.tensorrt.library import LibraryInfo
from flashnext.runtime.cli.parser import Commands, Parser, output_file

DESCRIPTION = """\
The library with the CUDA kernels as TensorRT plugins, which engines are built and run with.

  build   compile it with nvcc 13 (a toolkit's, or from PyPI); into the cache, or to a file with --out
  path    print where it is: the file that $FLASHNEXT_PLUGINS names, or the latest one that was built
  check   say what a library file is; nothing of it is executed"""

EXAMPLES = """\
examples:
  flashnext plugins build                         for the GPU at hand, or for all known ones without a GPU
  flashnext plugins build --target 90 --target 120
  flashnext plugins build --headers /path/to/TensorRT/include --out libflashnext_plugins.so
  flashnext plugins path --target 90              exit code 2 if there is none for sm_90
  flashnext plugins check libflashnext_plugins.so
  polygraphy run model.onnx --trt --plugins "$(flashnext plugins path)"

TensorRT's C++ headers come from --headers, from $TENSORRT_INCLUDE_DIR, from the system, or from:
  pip install --no-deps kernel-lens
"""


def add_parser(commands: Commands, parents: list[Parser]) -> Parser:
    """Describe the subcommand."""
    parser = commands.add_parser(
        "plugins",
        help="build, find or check the TensorRT plugin library",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        parents=parents,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    build = actions.add_parser("build", help="compile it", parents=parents)
    build.add_argument("--headers", metavar="FOLDER", help="folder with TensorRT's C++ headers")
    build.add_argument("--out", type=output_file, metavar="FILE", help="write the library there too")
    path = actions.add_parser("path", help="print where it is", parents=parents)
    for action, meaning in ((build, "compute capability, such as 90 (may be repeated)"), (path, "one that runs there")):
        action.add_argument("--target", metavar="SM", action="append", help=meaning)
    check = actions.add_parser("check", help="say what a file is", parents=parents)
    check.add_argument("file", metavar="FILE", help="a plugin library")
    for action in (build, path, check):
        action.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    actions: dict[str, Callable[[argparse.Namespace], LibraryInfo]] = {"build": build, "path": path, "check": check}
    info = actions[arguments.action](arguments)
    if arguments.json:
        print(json.dumps(facts(info), indent=1))
    elif arguments.action == "path":
        print(info.path)
    else:
        print(text(info))
    return 0


def build(arguments: argparse.Namespace) -> LibraryInfo:
    """Compile the library."""
    targets = arguments.target or default_targets()
    headers = arguments.headers or find_headers().folder
    names = ", ".join(f"sm_{t}" for t in targets)
    print(f"flashnext: compiling the kernels for {names}; this takes minutes per target", file=sys.stderr)
    return library.build(targets, headers, arguments.out)


def default_targets() -> list[str]:
    """The GPU at hand, or all that the kernels are written for."""
    try:
        return [gpu_target()]
    except PluginError:
        return list(library.TARGETS)


def path(arguments: argparse.Namespace) -> LibraryInfo:
    """The library that runs on every target."""
    info = library.find(*(arguments.target or [])[:1])
    for target in arguments.target or []:
        if not info.runs_on(target):
            raise PluginError(f"{info.path} does not run on sm_{target}. {library.REMEDY} --target {target}")
    return info


def check(arguments: argparse.Namespace) -> LibraryInfo:
    """What the file is."""
    return library.check(arguments.file)


def facts(info: LibraryInfo) -> dict[str, Any]:
    """As plain data."""
    return {**dataclasses.asdict(info), "path": str(info.path), "is_current": info.is_current}


def text(info: LibraryInfo) -> str:
    """As people read it."""
    made_for = ", ".join(f"sm_{c}" for c in info.capabilities)
    lines = [
        f"library     {info.path}",
        f"runs on     {made_for} (and later GPUs, by PTX)" if made_for else "runs on     CPUs only: host execution",
        f"ops         version {info.op_version} (table {info.op_table})",
        f"TensorRT    compiled with the headers of {info.tensorrt_headers}",
        f"sources     {'those of this installation' if info.is_current else 'others than this installation has'}",
        f"SHA-256     {info.sha256}",
    ]
    return "\n".join(lines)
