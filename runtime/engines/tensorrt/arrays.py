"""Arrays in device memory, so that what one graph makes for the next never visits the host.

A `DeviceArray` is cut like a numpy array (whole numbers and slices, as long as the bytes stay together) and can be read
or written from the host, which waits for the device. `Joined` are rows that an engine puts together in its own input
buffer. A result is good until its graph runs again: using it later is an error, and not another step's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashnext.runtime.engines.base import Array
from flashnext.runtime.engines.tensorrt.device import ALIGNMENT, Device, Memory


class Buffer:
    """Device memory that results are put into again and again; `generation` counts how often."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.generation = 0


class DeviceArray:
    """`shape` values of `dtype` at an address of a device.

    Args:
        stream: on which the values are made and used; copies from and to the host go through it.
        buffer: whose present contents these are; None: contents that stay.
    """

    def __init__(
        self,
        device: Device,
        stream: int,
        address: int,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        buffer: Buffer | None = None,
    ) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._device, self._stream, self._address = device, stream, address
        self._buffer, self._generation = buffer, buffer.generation if buffer else 0

    @property
    def address(self) -> int:
        """Where the values are.

        Raises:
            RuntimeError: they have been overwritten by a later step.
        """
        if self._buffer is not None and self._buffer.generation != self._generation:
            raise RuntimeError("These values are of an earlier step of their graph, and overwritten since.")
        return self._address

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def aligned(self) -> bool:
        """Whether a graph can take the values where they are."""
        return self._address % ALIGNMENT == 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> DeviceArray:
        """A part whose bytes lie together.

        Raises:
            IndexError: it lies outside the array, or apart.
        """
        offset, shape = part(self.shape, index)
        address = self.address + offset * self.dtype.itemsize
        return DeviceArray(self._device, self._stream, address, shape, self.dtype, self._buffer)

    def __setitem__(self, index: Any, values: Array) -> None:
        """Write from the host, and wait for it."""
        target = self[index]
        values = np.ascontiguousarray(np.broadcast_to(values, target.shape), self.dtype)
        self._device.copy(target.address, values.ctypes.data, values.nbytes, self._stream)
        self._device.synchronize(self._stream)

    def copy(self) -> Array:
        """The values on the host; waits for them."""
        values: Array = np.empty(self.shape, self.dtype)
        self._device.copy(values.ctypes.data, self.address, self.nbytes, self._stream)
        self._device.synchronize(self._stream)
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.copy() if dtype is None else self.copy().astype(dtype)

    @staticmethod
    def joined(rows: Sequence[DeviceArray], width: int) -> Joined:
        """See `flashnext.runtime.hand_over.join`."""
        return Joined(tuple(rows), width)


@dataclass(frozen=True)
class Joined:
    """Rows [k, …] of any k up to `width` that an engine takes as one input [len(rows), width, …].

    What lies behind a shorter row is whatever the input buffer held; nothing reads it (`new_len`).
    """

    rows: tuple[DeviceArray, ...]
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), self.width, *self.rows[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.rows[0].dtype


def part(shape: Sequence[int], index: Any) -> tuple[int, tuple[int, ...]]:
    """Offset (in elements) and shape of a part of a contiguous array.

    Raises:
        IndexError: an index outside, a step other than 1, or a part whose elements do not lie together.
    """
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > len(shape):
        raise IndexError(f"{len(indices)} indices for an array of {len(shape)} axes.")
    offset, kept = 0, []
    rest = math.prod(shape)
    cut = False  # an axis before this one keeps several elements, so this one has to be kept whole
    for size, at in zip(shape, [*indices, *[slice(None)] * (len(shape) - len(indices))], strict=True):
        rest //= max(size, 1)
        start, count = _range(size, at)
        if cut and count != size:
            raise IndexError(f"The part {index!r} of an array {list(shape)} on a device does not lie together.")
        cut |= count > 1
        offset += start * rest
        if isinstance(at, slice):
            kept.append(count)
    return offset, tuple(kept)


def _range(size: int, at: Any) -> tuple[int, int]:
    if isinstance(at, slice):
        start, stop, step = at.indices(size)
        if step != 1:
            raise IndexError("Arrays on a device are cut in steps of 1.")
        return start, max(stop - start, 0)
    place = int(at) + (size if at < 0 else 0)
    if not 0 <= place < size:
        raise IndexError(f"Index {at} lies outside an axis of {size}.")
    return place, 1
