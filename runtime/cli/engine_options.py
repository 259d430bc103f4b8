"""Options of every command that runs an engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flashnext.runtime.cli.parser import whole_number
from flashnext.runtime.engines.base import MOST_THREADS

ENGINES = "onnxruntime (default), torch (CUDA kernels on a GPU), tensorrt or tensorrt-rtx (made by `flashnext build`)"
PROVIDER = (
    "onnxruntime: execution provider, such as CUDAExecutionProvider or CUDAExecutionProvider:device_id=1,…; give it "
    "again for the next one (default: the CPU's)"
)
EXPERT_MEMORY = "tensorrt: where the experts' weights are (default: device; host: read over PCIe, for a smaller GPU)"


def add_engine_options(add: Callable[..., Any]) -> None:
    """Describe them; `add` is `add_argument` of a group."""
    add("--engine", default="onnxruntime", help=ENGINES)
    add("--checkpoint", metavar="FOLDER", help="where the weights are, if they have moved")
    add("--threads", type=whole_number(1, MOST_THREADS), metavar="N", help="onnxruntime, torch: threads of the engine")
    add("--provider", action="append", type=provider, dest="providers", metavar="NAME[:OPTION=VALUE,…]", help=PROVIDER)
    add_plan_options(add)
    add("--expert-memory", choices=("device", "host"), default="device", help=EXPERT_MEMORY)


def provider(text: str) -> tuple[str, dict[str, str]]:
    """Converter for a provider with its options; commas and colons after the first one belong to values.

    An option starts at a word followed by `=`, so that a value may be a list: `a:1x2,b:3`.
    """
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    last = ""
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if equals and key.isidentifier():
            options[key], last = value, key
        elif last:
            options[last] += f",{part}"
        else:
            raise argparse.ArgumentTypeError(f"expected NAME or NAME:OPTION=VALUE,…, found {text!r:.80}")
    return name, options


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given, as `flashnext.runtime.engines.engine_set.EngineOptions` takes it."""
    named = {name: getattr(arguments, name) for name in ("threads", "providers", "expert_memory")}
    return {**named, **plan_options(arguments)}


def add_plan_options(add: Callable[..., Any]) -> None:
    """Describe those that say which plans are run."""
    add("--engine-path", metavar="FOLDER", help="tensorrt: the engine's folder (default: found below BUNDLE/engines)")
    add("--plugins", metavar="FILE", help="tensorrt: the engine's plugin library (default: of this installation)")


def plan_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given of those."""
    return {name: getattr(arguments, name) for name in ("engine_path", "plugins")}
