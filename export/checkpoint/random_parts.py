"""Which values a stored tensor of a random checkpoint holds: a canonical tensor, a part of it, and codes or scales.

Canonical tensors have the experts of a layer fused and n-gram tables whole, so that a checkpoint's values do not depend
on how it is laid out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
FUSED = re.compile(r"(.*\.mlp\.experts\.(?:gate_up|down)_proj)(_scale_inv)?")
TABLE = re.compile(r"(.*\.ngram_embedding)\.(?:shard_(\d+)\.)?(weight\w*)")


@dataclass(frozen=True)
class Part:
    """`index` into the canonical tensor; `what` is the end of a tensor's name, as "weight" or "weight_scale_inv";
    `matrix` names what is quantized together."""

    canonical: str
    index: tuple[Any, ...] = (...,)
    what: str = "weight"
    matrix: str = ""


def part_of(name: str, width: int, rows_each: int) -> Part:
    """The part that a tensor holds; `width` is the experts', `rows_each` the rows of an n-gram shard."""
    if match := EXPERT.fullmatch(name):
        at, expert, which, what = match.groups()
        columns = {"gate": slice(0, width), "up": slice(width, None), "down": slice(None)}[which]
        canonical = f"{at}.{'down' if which == 'down' else 'gate_up'}_proj"
        return Part(canonical, (int(expert), columns), what, f"{at}.{expert}.{which}")
    if match := FUSED.fullmatch(name):
        return Part(match[1], what=f"weight{match[2] or ''}", matrix=match[1])
    if match := TABLE.fullmatch(name):
        canonical, shard = f"{match[1]}.weight", match[2]
        rows = slice(None) if shard is None else slice(int(shard) * rows_each, (int(shard) + 1) * rows_each)
        return Part(canonical, (rows,), match[3], name.rsplit(".", 1)[0])
    return Part(name)
