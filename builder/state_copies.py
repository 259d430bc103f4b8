"""Whether a plan leaves states where they are: no layer but their plugin may read or write them.

TensorRT may put copies or changes of layout between a network's edge and a plugin. Of a state that would move up to a
hundred megabytes a step, so an engine that does is not kept. The layers come from TensorRT's engine inspector.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from flashnext.export.errors import BuildError

PLUGIN = "plugin"


def check_no_copies(information: str, states: Mapping[str, str]) -> None:
    """Raise a BuildError if a layer other than a plugin touches a state.

    Args:
        information: what `EngineInspector.get_engine_information` says of a plan, as JSON with details.
        states: each state's input and output.
    """
    names = {*states, *states.values()}
    seen: set[str] = set()
    for layer in _layers(information):
        touched = names & {*_tensors(layer, "Inputs"), *_tensors(layer, "Outputs")}
        seen |= touched
        if touched and PLUGIN not in str(layer.get("LayerType", "")).lower():
            raise BuildError(
                f"TensorRT copies the state {min(touched)} in the layer {str(layer.get('Name'))[:100]!r} "
                f"({str(layer.get('LayerType'))[:40]}), which costs more than the step itself. Nothing was kept; build "
                "with another version of TensorRT, and report this one."
            )
    if missing := sorted(names - seen):
        raise BuildError(f"TensorRT's inspector names no layer that uses the state {missing[0]}; it cannot be checked.")


def _layers(information: str) -> Iterator[dict[str, Any]]:
    for layer in json.loads(information)["Layers"]:
        if not isinstance(layer, dict):
            raise BuildError("TensorRT's inspector gives the layers' names alone, so copies of states would not show.")
        yield layer


def _tensors(layer: dict[str, Any], side: str) -> Iterator[str]:
    return (str(tensor.get("Name")) for tensor in layer.get(side, ()))
