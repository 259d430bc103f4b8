"""Settings of the rotary embedding: what `rope_parameters` of a checkpoint, or `--rope-scaling`, says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from flashnext.export.fields import FieldReader


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: plain, or YaRN when `rope_type` is "yarn" (arXiv 2309.00071)."""

    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(raw: dict[str, Any], native_context: Any = None) -> tuple[RopeConfig, list[str]]:
    """Parse `rope_parameters` (also the argument of `--rope-scaling`); returns the faults beside the result."""
    sub = FieldReader({("rope_type" if k == "type" else k): v for k, v in raw.items()})
    kind = sub.choice("rope_type", "default", ("default", "yarn"))
    known = {f.name for f in dataclasses.fields(RopeConfig)} | {"mrope_section", "mrope_interleaved"}
    if unknown := sorted(set(sub.raw) - known):
        sub.faults.append(f"unknown rope parameters {', '.join(unknown)}")

    def maybe(name: str) -> float | None:
        return None if sub.raw.get(name) is None else sub.number(name, None, 0.0, 1e6)

    fields: dict[str, Any] = {
        "rope_theta": sub.number("rope_theta", 10000.0, 1.0, 1e12),
        "partial_rotary_factor": sub.number("partial_rotary_factor", 1.0, 1e-6, 1.0),
        "rope_type": kind,
    }
    if kind == "yarn":
        native = native_context if isinstance(native_context, int) and native_context > 0 else None
        fields.update(
            factor=sub.number("factor", None, 1.0, 1024.0),
            original_max_position_embeddings=sub.integer("original_max_position_embeddings", native, high=1 << 26),
            attention_factor=maybe("attention_factor"),
            beta_fast=sub.number("beta_fast", 32.0, 1e-6, 1e6),
            beta_slow=sub.number("beta_slow", 1.0, 1e-6, 1e6),
            mscale=maybe("mscale"),
            mscale_all_dim=maybe("mscale_all_dim"),
            truncate=sub.boolean("truncate", True),
        )
    return RopeConfig(**fields), [f"rope_parameters: {f}" for f in sub.faults]
