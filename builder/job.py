"""What one plan is built from: plain data that goes to the process which builds it, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from flashnext.builder.engine_manifest import Range


@dataclass(frozen=True)
class PlanJob:
    """One plan of one graph.

    `graph` is the ONNX file to build and `plan` the file to write, both relative to the process's working folder;
    `weights` is the folder that the graph's external data lies in. `profiles` are the ranges of dynamic inputs, a
    mapping for each kind of step that the plan takes. `workspace` limits what a layer may use on the
    device, in bytes (0: no limit).
    """

    kind: str
    graph: str
    plan: str
    weights: str
    profiles: tuple[Mapping[str, Range], ...]
    capabilities: tuple[int, ...] = ()
    plugins: str = ""
    timing_cache: str = ""
    hardware_compatible: bool = False
    version_compatible: bool = False
    workspace: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlanJob:
        raw = json.loads(text)
        raw["profiles"] = tuple(
            {name: Range(*(tuple(r[side]) for side in ("min", "opt", "max"))) for name, r in profile.items()}
            for profile in raw["profiles"]
        )
        raw["capabilities"] = tuple(raw["capabilities"])
        return cls(**raw)
