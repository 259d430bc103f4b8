"""What a checkpoint holds by part, and the memory that a text takes: the figures behind `flashnext info`.

Parameters are counted from the checkpoint's headers, memory from the states that the graphs of a bundle would have.
Nothing is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flashnext.export.checkpoint.safetensors_file import TensorInfo
from flashnext.export.config import ModelConfig
from flashnext.export.graphs.io import BuildOptions, graph_names, graph_spec
from flashnext.export.graphs.manifest import GraphSpec, TensorSpec

PATTERNS = {
    "MTP layer": r"mtp\.",
    "embedding": r"embed_tokens\.",
    "LM head": r"lm_head\.",
    "n-gram table": r".*\.ple_embedding\.",
    "n-gram projections": r".*\.ple\.",
    "gated residuals": r".*hyper_connection",
    "gated delta nets": r".*\.linear_attn\.",
    "sparse attention": r".*\.self_attn\.",
    "routed experts": r".*\.mlp\.experts\.",
    "shared experts": r".*\.mlp\.shared_expert",
    "routers": r".*\.mlp\.gate\.",
}
"""First match of a tensor's name decides its part; the MTP layer is counted as one."""
OTHER = "other"

ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True)
class Part:
    """Tensors of one part of the model. A packed byte holds two parameters; scales are bytes but no parameters."""

    name: str
    tensors: int
    parameters: int
    bytes: int


def count_parts(tensors: Mapping[str, TensorInfo]) -> list[Part]:
    """The parts that a checkpoint has, in the order of `PATTERNS`."""
    groups: dict[str, list[TensorInfo]] = {name: [] for name in (*PATTERNS, OTHER)}
    for name, info in tensors.items():
        groups[part_of(name)].append(info)
    return [_part(name, infos) for name, infos in groups.items() if infos]


def part_of(tensor: str) -> str:
    """The part that a tensor (prefix stripped) belongs to."""
    return next((part for part, pattern in PATTERNS.items() if re.match(pattern, tensor)), OTHER)


def total(parts: Iterable[Part]) -> Part:
    """The sum over parts."""
    parts = list(parts)
    return Part("total", *(sum(getattr(p, what) for p in parts) for what in ("tensors", "parameters", "bytes")))


def _part(name: str, infos: list[TensorInfo]) -> Part:
    return Part(name, len(infos), sum(map(parameters, infos)), sum(i.length for i in infos))


SCALE = re.compile(r".*_scale(_inv|_2)?")


def parameters(info: TensorInfo) -> int:
    """How many of the model's parameters a stored tensor holds."""
    if SCALE.fullmatch(info.name):
        return 0
    return math.prod(info.shape) * (2 if info.dtype == "U8" else 1)


def slot_bytes(config: ModelConfig, options: BuildOptions) -> int:
    """Bytes of everything that one slot of a bundle with these options remembers."""
    return state_bytes(graph_spec(config, options, name) for name in graph_names(config))


def state_bytes(graphs: Iterable[GraphSpec]) -> int:
    """Bytes per slot of the states of these graphs; a state that two graphs share counts once."""
    states = {t.name: t for t in _states(graphs)}
    return sum(math.prod(int(d) for d in t.shape[1:]) * ITEM_BYTES[t.dtype] for t in states.values())


def _states(graphs: Iterable[GraphSpec]) -> Iterator[TensorSpec]:
    for graph in graphs:
        yield from (t for t in graph.inputs if t.role == "state")


CONTEXTS = (4096, 32768, 131072, 262144, 1048576)


def context_lengths(config: ModelConfig) -> list[int]:
    """Lengths worth showing for a model: the usual ones below its limit, and the limit."""
    limit = config.max_position_embeddings
    return [*(n for n in CONTEXTS if n < limit), limit]
