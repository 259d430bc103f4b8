"""States in device memory: what sequences remember, bound by address to the graphs that share it.

An engine with plugins updates a state in place: input and output have one address. TensorRT for RTX has no plugins; its
plans read one buffer and write another, so a state has two, which change roles with every run of a graph that has it.
That takes twice the memory, and a copy of every state in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashnext.export.graphs.manifest import TensorSpec
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.tensorrt.arrays import DeviceArray
from flashnext.runtime.engines.tensorrt.session import Session


class DeviceState:
    """One state: `current` is what the next run reads, `target` where it writes."""

    def __init__(self, current: DeviceArray, other: DeviceArray | None = None) -> None:
        self.current = current
        self.target = other or current

    @property
    def in_place(self) -> bool:
        return self.target is self.current

    def ran(self) -> None:
        """A run that has the state was queued."""
        self.current, self.target = self.target, self.current


class DeviceStates(Mapping[str, DeviceArray]):
    """What the states hold now, by name; like the arrays of `flashnext.runtime.states`."""

    def __init__(self, states: Mapping[str, DeviceState]) -> None:
        self._states = states

    def __getitem__(self, name: str) -> DeviceArray:
        return self._states[name].current

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def allocate(session: Session, specs: Mapping[str, TensorSpec], in_place: bool) -> dict[str, DeviceState]:
    """Zeroed states."""

    def one(spec: TensorSpec) -> DeviceArray:
        return session.array([int(d) for d in spec.shape], numpy_dtype(spec.dtype))

    return {name: DeviceState(one(spec), None if in_place else one(spec)) for name, spec in specs.items()}
