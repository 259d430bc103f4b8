"""Inputs on their way to a device that is late, or early: every step reads its own."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from onnxruntime_plans import module

from flashnext.runtime.engines.tensorrt.arrays import DeviceArray
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.plan import Library
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.engines.tensorrt.staging import Staging

STEPS = 12


@pytest.mark.parametrize("seed", [None, *range(20)])
@pytest.mark.parametrize("on_side", [False, True])
def test_no_step_waits_for_the_host_and_each_reads_its_own_inputs(seed: int | None, on_side: bool) -> None:
    """A reader follows each copy on the main stream; nobody waits until the end."""
    device = HostDevice(seed)
    session = Session(device, Library("tensorrt", module))
    consumed = device.new_event()
    staging = Staging(session, {"ids": 16, "rows": 40}, consumed, on_side=on_side)
    read: list[tuple[bytes, bytes]] = []

    def reader() -> None:
        read.append((ctypes.string_at(staging.address("ids"), 16), ctypes.string_at(staging.address("rows"), 40)))

    ids, rows = np.zeros(4, np.int32), np.zeros(10, np.float32)
    for step in range(STEPS):
        ids[:], rows[:] = step, step / 2
        staging.put({"ids": ids, "rows": rows})
        device.queue(session.stream, reader)
        device.record(consumed, session.stream)
    ids[:] = -1  # the caller's arrays may change at once
    device.synchronize(session.stream)
    assert [np.frombuffer(a, np.int32).tolist() for a, _ in read] == [[step] * 4 for step in range(STEPS)]
    assert [np.frombuffer(b, np.float32)[0] for _, b in read] == [step / 2 for step in range(STEPS)]


def test_pinned_results_are_used_again_only_when_their_arrays_are_gone() -> None:
    device = HostDevice()
    session = Session(device, Library("tensorrt", module))
    source = session.upload(np.arange(8, dtype=np.float32))
    first = session.result(source.address, (2, 4), source.dtype)
    second = session.result(source.address, (2, 4), source.dtype)
    device.synchronize(session.stream)
    assert first.ctypes.data != second.ctypes.data
    place, part = first.ctypes.data, first[1]
    del first
    assert session.result(source.address, (2, 4), source.dtype).ctypes.data != place  # `part` still reads it
    np.testing.assert_array_equal(part, [4, 5, 6, 7])
    del part
    assert session.result(source.address, (2, 4), source.dtype).ctypes.data == place
    session.close()
    np.testing.assert_array_equal(second, np.arange(8).reshape(2, 4))  # good after the session, too


def test_parts_of_an_array_on_the_device_are_those_of_numpy() -> None:
    session = Session(HostDevice(), Library("tensorrt", module))
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    array = session.upload(values)
    for index in (0, -1, slice(1, 2), (1, slice(0, 2)), (1, 2, slice(1, 3)), slice(2, 2), (slice(0, 1), slice(1, 3))):
        np.testing.assert_array_equal(np.asarray(array[index]), values[index])
        assert array[index].shape == values[index].shape
    np.testing.assert_array_equal(array[1][2].copy(), values[1][2])
    for index in ((slice(None), 0), (slice(0, 2), slice(0, 2)), slice(None, None, 2), 2, (0, 0, 0, 0), (0, -4)):
        with pytest.raises(IndexError):
            array[index]
    array[1, :2] = values[0, :2]
    np.testing.assert_array_equal(array[1].copy(), [*values[0, :2], values[1, 2]])
    assert isinstance(array[0], DeviceArray)
