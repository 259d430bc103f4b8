"""Both devices keep the protocol's promises: the played one, and CUDA's with its functions played."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_on_host import CudaOnHost
from engine_folder import Machine

from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.errors import EngineError, RequestError
from flashnext.runtime import LLM, SamplingParams
from flashnext.runtime.engines.tensorrt import opening
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.device import ALIGNMENT, Device
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.ngram_memory import TableMemory
from flashnext.runtime.ngram_table import NgramTable

DEVICES: dict[str, Callable[[HostDevice], Device]] = {
    "host": lambda host: host,
    "cuda": lambda host: CudaDevice(CudaOnHost(host)),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    return DEVICES[request.param](HostDevice())


def bytes_at(address: int, count: int = 4) -> bytes:
    return ctypes.string_at(address, count)


def test_memory_is_aligned_zeroed_and_counted(device: Device) -> None:
    free = device.free_bytes()
    memory, pinned = device.allocate(1000), device.allocate_pinned(100)
    assert memory.address % ALIGNMENT == 0
    assert bytes_at(memory.address, 1000) == bytes(1000)
    assert (memory.pinned, pinned.pinned) == (False, True)
    assert device.free_bytes() == free - 1000
    device.release(memory)
    device.release(memory)  # twice does no harm
    assert device.free_bytes() == free
    assert device.capability == 90


def test_a_copy_is_done_when_its_stream_was_waited_for(device: Device) -> None:
    values = np.arange(4, dtype=np.uint8)
    memory, stream = device.allocate(4), device.new_stream()
    device.copy(memory.address, values.ctypes.data, 4, stream)
    assert bytes_at(memory.address) == bytes(4)  # not before
    device.synchronize(stream)
    assert bytes_at(memory.address) == bytes([0, 1, 2, 3])


def test_an_event_orders_two_streams(device: Device) -> None:
    first, second, done = device.new_stream(), device.new_stream(), device.new_event()
    values, memory, result = np.full(4, 7, np.uint8), device.allocate(4), device.allocate(4)
    device.wait(second, done)  # never recorded: does not hold it up
    device.copy(memory.address, values.ctypes.data, 4, first)
    device.record(done, first)
    device.wait(second, done)
    device.copy(result.address, memory.address, 4, second)
    device.synchronize(second)
    assert bytes_at(result.address) == bytes([7] * 4)
    device.synchronize_event(done)
    device.synchronize_event(device.new_event())


def test_a_graph_runs_when_it_is_launched_as_often_as_it_is(device: Device) -> None:
    stream, values, memory = device.new_stream(), np.full(4, 1, np.uint8), device.allocate(4)
    graph = device.capture(stream, lambda: device.copy(memory.address, values.ctypes.data, 4, stream))
    device.synchronize(stream)
    assert bytes_at(memory.address) == bytes(4)
    for value in (3, 9):
        values[:] = value
        device.launch(graph, stream)
        device.synchronize(stream)
        assert bytes_at(memory.address) == bytes([value] * 4)
    device.release_graph(graph)


def test_a_capture_that_fails_leaves_the_stream_usable(device: Device) -> None:
    stream, values, memory = device.new_stream(), np.full(4, 5, np.uint8), device.allocate(4)

    def fails() -> None:
        raise EngineError("TensorRT refuses a step.")

    with pytest.raises(EngineError, match="refuses a step"):
        device.capture(stream, fails)
    device.copy(memory.address, values.ctypes.data, 4, stream)
    device.synchronize(stream)
    assert bytes_at(memory.address) == bytes([5] * 4)


def test_closing_keeps_pinned_memory_for_its_owners(device: Device) -> None:
    free = device.free_bytes()
    pinned = device.allocate_pinned(4)
    device.allocate(100)
    device.close()
    assert device.free_bytes() == free
    assert bytes_at(pinned.address) == bytes(4)
    device.release(pinned)


def test_released_memory_may_not_be_used(device: Device) -> None:
    memory, stream = device.allocate(8), device.new_stream()
    device.release(memory)
    device.copy(memory.address, memory.address + 4, 4, stream)
    with pytest.raises(RuntimeError, match="lie in released memory"):
        device.synchronize(stream)


def uses(device: Device) -> None:
    """A call of each kind that can fail."""
    stream = device.new_stream()
    device.allocate(64)
    device.allocate_pinned(64)
    device.capture(stream, lambda: None)
    device.synchronize(stream)


FAILURES = {
    "cudaMalloc": ("cudaErrorMemoryAllocation", "There is no device memory of 64 bytes: cudaErrorMemoryAllocation"),
    "cudaHostAlloc": ("cudaErrorMemoryAllocation", "The system has no pinned memory of 64 bytes: cudaErrorMemory"),
    "cudaStreamSynchronize": ("cudaErrorIllegalAddress", "cudaStreamSynchronize failed: cudaErrorIllegalAddress (an"),
    "cudaGraphInstantiate": ("cudaErrorInvalidValue", "cudaGraphInstantiate failed: cudaErrorInvalidValue (invalid"),
}


@pytest.mark.parametrize("function", FAILURES)
def test_what_cuda_reports_is_said(function: str) -> None:
    cuda = CudaOnHost(HostDevice())
    device = CudaDevice(cuda)
    error, said = FAILURES[function]
    cuda.fail(function, error)
    with pytest.raises(EngineError) as caught:
        uses(device)
    assert str(caught.value).startswith(said)
    assert "cudaGraphDestroy" in cuda.called or function != "cudaGraphInstantiate"


def test_no_gpu_is_said() -> None:
    cuda = CudaOnHost(HostDevice())
    cuda.fail("cudaGetDeviceCount", "cudaErrorNoDevice")
    with pytest.raises(EngineError, match=r"needs a GPU and its driver .*: cudaErrorNoDevice \(no CUDA-capable device"):
        CudaDevice(cuda)


def test_the_engine_runs_on_the_cuda_device(engine: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that the engine makes into CUDA, with the arguments that it gives."""
    cuda = CudaOnHost(machine(3))
    monkeypatch.setattr(opening, "new_device", lambda: CudaDevice(cuda))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, draft_tokens=2)
    with LLM(engine, engine="tensorrt") as llm, LLM(engine, threads=1, prefill_chunk=48) as reference:
        prompts = [[1, 2, 3], list(range(60))]
        found, wanted = (x.generate(prompts, params) for x in (llm, reference))
        assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert {"cudaGraphLaunch", "cudaHostAlloc", "cudaFreeHost", "cudaFree", "cudaStreamWaitEvent"} <= {*cuda.called}


def test_a_pinned_table_is_one_that_the_device_may_read(device: Device, random_checkpoint: Path) -> None:
    """The same rows for the host, in memory that is pinned until the table is closed."""
    checkpoint = Checkpoint.open(random_checkpoint)
    spec, memory = checkpoint.ngram_spec(1), TableMemory("pinned", device)
    table = NgramTable.open(spec, checkpoint, "float32", memory)
    wanted = NgramTable.open(spec, checkpoint, "float32").gather(np.arange(spec.rows))
    np.testing.assert_array_equal(table.gather(np.arange(spec.rows)), wanted)
    assert memory.device_address(table.shards[1]) == table.shards[1].ctypes.data
    memory.close()
    memory.close()  # twice does no harm


def test_a_table_that_cannot_be_pinned_is_said(random_checkpoint: Path) -> None:
    cuda = CudaOnHost(HostDevice())
    cuda.fail("cudaHostRegister", "cudaErrorNotPermitted")
    checkpoint, memory = Checkpoint.open(random_checkpoint), TableMemory("pinned", CudaDevice(cuda))
    with pytest.raises(
        RequestError, match=r'cannot pin [\d,]+ bytes: cudaErrorNotPermitted .* Take ngram_table = "huge"'
    ):
        memory.place(checkpoint, checkpoint.ngram_spec(1).shards)
    memory.close()
