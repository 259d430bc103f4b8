"""Whether an engine leaves its states where they are: no layer but its plugin may touch one.

A state is written in place by one plugin. Where TensorRT puts a copy or a change of format between the network's state
and the plugin (as a layer of its own, or inside a fused one), every step would move the whole state (113 MB of
recurrent state a slot at the official size), and what the plugin writes in place may not reach the state at all. The
engine inspector lists the layers with the tensors that they read and write; an engine in which a layer that is no
plugin touches a state is refused.

The list is as detailed as the engine was built to be (`ProfilingVerbosity.DETAILED`). With names alone nothing can be
said about tensors; then only layer names that mention a state are looked at. The format of TensorRT 10 and 11 is read:
both list `Layers` with `Name`, `LayerType`, `Inputs` and `Outputs`, of which only names are used here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashnext.export.errors import EngineError
from flashnext.export.files import plain
from flashnext.export.ops import schema

LOGGER = logging.getLogger("flashnext.tensorrt")

PLUGIN_TYPES = ("plugin", *(op.name.lower() for op in schema.OPS))
"""Parts of the types (in lower case) of layers that are plugins."""
MOVING_NAMES = ("reformatting copynode", " copy", "reformat")


class Inspected(Protocol):
    """What is needed of a plan."""

    def layers(self) -> str: ...


def check_states_stay(plan: Inspected, states: Mapping[str, str], path: Path) -> None:
    """Raise an EngineError if a layer of the plan moves a state; a list that cannot show it is said in the log.

    Args:
        states: input by output, as the engine's manifest has them.
        path: of the plan, for the message.
    """
    text = plan.layers()
    found = moved_states(text, states)
    if not found and unseen_states(text, states):
        LOGGER.warning("TensorRT's inspector does not show which layers of %s touch its states", path)
    if found:
        layer, state = found[0]
        more = f" ({len(found)} such layers)" if len(found) > 1 else ""
        raise EngineError(
            f"{path} moves the state {plain(state)} in the layer {plain(layer)}{more}: every step would copy it whole, "
            "and it might not be updated. Build the engine again; if it comes up again, please report it."
        )


def moved_states(text: str, states: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers that move a state, with the state's tensor, from the inspector's JSON of an engine.

    Raises:
        EngineError: the text is not what an inspector writes.
    """
    return [found for layer in _layers(text) for found in _moved(layer, {*states, *states.values()})]


def unseen_states(text: str, states: Mapping[str, str]) -> set[str]:
    """States that no layer of the list is said to read."""
    return states.keys() - {name for layer in _layers(text) for name in layer.tensors}


@dataclass(frozen=True)
class Layer:
    """A layer's name, its type in lower case, and what it reads and writes; "" and nothing where names are all."""

    name: str
    kind: str = ""
    tensors: tuple[str, ...] = ()


def _layers(text: str) -> list[Layer]:
    try:
        layers = json.loads(text)["Layers"]
        if not isinstance(layers, list):
            raise TypeError(f"Layers is {layers!r:.40}")
        return [Layer(layer) if isinstance(layer, str) else _layer(layer) for layer in layers]
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise EngineError(f"TensorRT's inspector answers with what cannot be read ({cause!r:.200}).") from None


def _layer(raw: Any) -> Layer:
    tensors = tuple(str(t["Name"]) for side in ("Inputs", "Outputs") for t in raw.get(side, []))
    return Layer(str(raw.get("Name", "")), str(raw.get("LayerType", "")).lower(), tensors)


def _moved(layer: Layer, states: set[str]) -> Iterator[tuple[str, str]]:
    if not layer.kind:  # a name only: "Reformatting CopyNode for Input Tensor 3 to layers.0…"
        if any(sign in layer.name.lower() for sign in MOVING_NAMES):
            yield from ((layer.name, state) for state in sorted(states) if state in layer.name)
    elif not any(sign in layer.kind for sign in PLUGIN_TYPES):
        yield from ((layer.name, tensor) for tensor in layer.tensors if tensor in states)
