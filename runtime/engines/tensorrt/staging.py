"""Inputs on their way from the host to the device.

A `Staging` is a place in device memory, with two pinned buffers in front of it: while the copy from one is under way,
the next step fills the other. The small inputs of a step (ids, lengths) share one place and so one copy; n-gram rows
have one of their own, whose copies run on the side stream while the graph before is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.tensorrt.device import ALIGNMENT, Device, Memory
from flashnext.runtime.engines.tensorrt.session import HostView, Session

BUFFERS = 2


@dataclass(frozen=True)
class _Slot:
    memory: Memory
    bytes: NDArray[np.uint8]
    copied: int
    """Event: what was in it has been copied, and what followed is done."""
    views: dict[Any, Array] = field(default_factory=dict)
    """The places of inputs by name, shape and dtype, as they come up."""


class Staging:
    """Inputs by name, each with room for its largest shape.

    Args:
        sizes: bytes of each input at most.
        consumed: event of the graph's last run, which still reads what is there.
    """

    def __init__(self, session: Session, sizes: Mapping[str, int], consumed: int, *, on_side: bool = False) -> None:
        device: Device = session.device
        self._device, self._main = device, session.stream
        self._stream = session.side if on_side else session.stream
        self._consumed = consumed
        self._offsets: dict[str, int] = {}
        total = 0
        for name, nbytes in sizes.items():
            self._offsets[name] = total
            total += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self._place = device.allocate(total)
        self._slots: list[_Slot] = []
        self._next = 0

    def _new_slot(self, nbytes: int) -> _Slot:
        memory = self._device.allocate_pinned(nbytes)
        return _Slot(memory, np.asarray(HostView(memory)), self._device.new_event())

    def address(self, name: str) -> int:
        """Where the input is on the device."""
        return self._place.address + self._offsets[name]

    def put(self, arrays: Mapping[str, Array], then: Callable[[], None] = lambda: None) -> None:
        """Queue the copy of some inputs, and what `then` queues behind it on the same stream; later work of the main
        stream sees both. The arrays may change at once."""
        if not self._slots:  # what only other graphs fill needs none
            self._slots = [self._new_slot(self._place.nbytes) for _ in range(BUFFERS)]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % BUFFERS
        self._device.synchronize_event(slot.copied)
        end = 0
        for name, array in arrays.items():
            form = name, array.shape, array.dtype
            if form not in slot.views:
                begin = self._offsets[name]
                slot.views[form] = slot.bytes[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            slot.views[form][...] = array
            end = max(end, self._offsets[name] + array.nbytes)
        if self._stream != self._main:
            self._device.wait(self._stream, self._consumed)
        self._device.copy(self._place.address, slot.memory.address, end, self._stream)
        then()
        self._device.record(slot.copied, self._stream)
        if self._stream != self._main:
            self._device.wait(self._main, slot.copied)

    def release(self) -> None:
        """Give the pinned buffers back, once no copy is under way."""
        for slot in self._slots:
            self._device.release(slot.memory)
