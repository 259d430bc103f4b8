"""Whether an engine leaves its states where they are: no layer may copy or reformat one.

A state is written in place by one plugin. Where TensorRT puts a copy or a change of format between the network's state
and the plugin, every step would move the whole state (113 MB of recurrent state a slot at the official size), and what
the plugin writes in place may not reach the state at all. The engine inspector lists the layers with the tensors that
they read and write; an engine in which a moving layer touches a state is refused.

The list is as detailed as the engine was built to be (`ProfilingVerbosity.DETAILED`). With names alone nothing can be
said about tensors; then only layer names that mention a state are looked at. The format of TensorRT 10 and 11 is read:
both list `Layers` with `Name`, `LayerType`, `Inputs` and `Outputs`, of which only names are used here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from flashnext.export.errors import EngineError
from flashnext.export.files import plain

MOVING_TYPES = ("reformat", "copy", "shuffle", "identity", "cast", "slice", "concat", "noop")
"""Layer types (in part, lower case) that move a tensor and compute nothing."""
MOVING_NAMES = ("reformatting copynode", " copy", "reformat")


class Inspected(Protocol):
    """What is needed of a plan."""

    def layers(self) -> str: ...


def check_states_stay(plan: Inspected, states: Mapping[str, str], path: Path) -> None:
    """Raise an EngineError if a layer of the plan copies or reformats a state.

    Args:
        states: input by output, as the engine's manifest has them.
        path: of the plan, for the message.
    """
    found = moved_states(plan.layers(), states)
    if found:
        layer, state = found[0]
        more = f" ({len(found)} such layers)" if len(found) > 1 else ""
        raise EngineError(
            f"{path} copies the state {plain(state)} in the layer {plain(layer)}{more}, so that every step would move "
            "it and it might not be updated. Build the engine again; if it comes up again, please report it."
        )


def moved_states(text: str, states: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers that move a state, with the state's tensor, from the inspector's JSON of an engine.

    Raises:
        EngineError: the text is not what an inspector writes.
    """
    try:
        layers = json.loads(text)["Layers"]
        if not isinstance(layers, list):
            raise TypeError(f"Layers is {layers!r:.40}")
        return [found for layer in layers for found in _moved(layer, {*states, *states.values()})]
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise EngineError(f"TensorRT's inspector answers with what cannot be read ({cause!r:.200}).") from None


def _moved(layer: Any, states: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(layer, str):  # names only: "Reformatting CopyNode for Input Tensor 3 to layers.0…"
        if any(sign in layer.lower() for sign in MOVING_NAMES):
            yield from ((layer, state) for state in sorted(states) if state in layer)
        return
    kind, name = str(layer.get("LayerType", "")).lower(), str(layer.get("Name", ""))
    if any(moving in kind for moving in MOVING_TYPES):
        tensors = [str(t["Name"]) for side in ("Inputs", "Outputs") for t in layer.get(side, [])]
        yield from ((name, tensor) for tensor in tensors if tensor in states)
