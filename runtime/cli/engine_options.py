"""Options of every command that runs an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flashnext.runtime.cli.parser import whole_number

ENGINES = "onnxruntime (default), torch (CUDA kernels on a GPU), tensorrt or tensorrt-rtx (made by `flashnext build`)"
EXPERT_MEMORY = "tensorrt: where the experts' weights are (default: device; host: read over PCIe, for a smaller GPU)"


def add_engine_options(add: Callable[..., Any]) -> None:
    """Describe them; `add` is `add_argument` of a group."""
    add("--engine", default="onnxruntime", help=ENGINES)
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    add("--threads", type=whole_number(1, 1024), metavar="N", help="onnxruntime, torch: threads of the engine")
    add("--engine-path", metavar="FOLDER", help="tensorrt: the engine's folder (default: found below BUNDLE/engines)")
    add("--expert-memory", choices=("device", "host"), default="device", help=EXPERT_MEMORY)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as `flashnext.runtime.engines.engine_set.EngineOptions` takes it."""
    return {name: getattr(arguments, name) for name in ("threads", "engine_path", "expert_memory")}
