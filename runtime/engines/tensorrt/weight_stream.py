"""Weights that are graph inputs, from the checkpoint's shards to device memory.

A thread reads the next piece of the files into one of two pinned buffers (several large reads at a time, in the order
of the files: `flashnext.runtime.reading`) while the device copies from the other. So the rate is that of the slower of
disk and PCIe, and host memory holds two buffers of it. Values are converted to the graph's dtype on the way, and scales
checked. With `in_host` the expert weights stay in pinned host memory, which kernels read over PCIe: for a GPU that
cannot hold them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, cycle

import numpy as np
from numpy.typing import NDArray

from flashnext.builder.engine_manifest import EngineManifest
from flashnext.export.checkpoint.reader import Checkpoint
from flashnext.export.checkpoint.safetensors_file import NUMPY_DTYPES
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import Manifest, WeightSpec
from flashnext.export.progress import byte_bar
from flashnext.runtime.engines.base import numpy_dtype
from flashnext.runtime.engines.tensorrt.arrays import DeviceArray
from flashnext.runtime.engines.tensorrt.device import Memory
from flashnext.runtime.engines.tensorrt.session import HostView, Session
from flashnext.runtime.ngram_memory import cache_has_room
from flashnext.runtime.reading import Piece, read_into_place
from flashnext.runtime.weights import Source, check_scales, sources

BUFFER_BYTES = 64 << 20
"""Of a pinned buffer: some milliseconds of PCIe, so that starting a copy does not count."""
PIECE_ALIGNMENT = 16


@dataclass(frozen=True)
class Part:
    """Elements `begin` … `begin + size` of a weight, and where in the file they are."""

    spec: WeightSpec
    source: Source
    begin: int
    size: int

    @property
    def nbytes(self) -> int:
        """In the weight."""
        return self.size * numpy_dtype(self.spec.dtype).itemsize

    @property
    def offset(self) -> int:
        """In the file."""
        return self.source.offset + (self.begin - self.source.begin) * self.source.dtype.itemsize


def is_expert(spec: WeightSpec) -> bool:
    """Whether a weight belongs to the experts, which are most of a checkpoint."""
    return ".experts." in spec.name


def freed(built: EngineManifest, manifest: Manifest, checkpoint: Checkpoint) -> list[WeightSpec]:
    """Weights that the plans take as inputs though the bundle's graphs do not: tensors of the checkpoint, as stored.

    Raises:
        EngineError: the checkpoint has no tensor of that name.
    """
    inputs = {t.name for graph in manifest.graphs.values() for t in graph.inputs}
    names = {name for graph in built.graphs.values() for name in graph.weights} - inputs
    if missing := names - checkpoint.tensors.keys():
        raise EngineError(f"The engine takes the weight {min(missing)}, which the checkpoint lacks. Build it again.")
    stored = {name: checkpoint.tensors[name] for name in sorted(names)}
    return [WeightSpec(n, NUMPY_DTYPES[i.dtype].name, tuple(i.shape), (n,)) for n, i in stored.items()]


def load(
    session: Session,
    specs: Sequence[WeightSpec],
    checkpoint: Checkpoint,
    in_host: bool = False,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, DeviceArray]:
    """Every weight by graph input name, with a progress bar in bytes per second.

    Raises:
        CheckpointError: a tensor is missing, has another number of elements, cannot be read, or is a scale of zero.
        EngineError: the device has no memory left.
    """
    parts = {spec.name: [*_parts(spec, checkpoint, buffer_bytes)] for spec in specs}  # checked before memory is taken
    by_name = {spec.name: spec for spec in specs}
    weights: dict[str, DeviceArray] = {}
    host: list[Part] = []
    for name, spec in by_name.items():
        pinned = in_host and is_expert(spec)
        weights[name] = session.array(spec.shape, numpy_dtype(spec.dtype), pinned)
        if pinned:
            host += parts.pop(name)
    device = [*chain.from_iterable(parts.values())]
    everything = sum(part.nbytes for part in chain(device, host))
    keep_cached = cache_has_room(checkpoint, everything, sum(part.nbytes for part in host))
    with byte_bar(everything, "loading weights") as bar:
        for part in _stream(session, device, weights, buffer_bytes, keep_cached):
            bar.update(part.nbytes)
        _read_in_place(host, weights, bar.update, keep_cached)
    return weights


def _parts(spec: WeightSpec, checkpoint: Checkpoint, limit: int) -> Iterator[Part]:
    """The sources of a weight, cut to what a buffer holds."""
    step = limit // numpy_dtype(spec.dtype).itemsize
    for source in sources(spec, checkpoint):
        end = source.begin + source.size
        for begin in range(source.begin, end, step):
            yield Part(spec, source, begin, min(step, end - begin))


@dataclass(frozen=True)
class _Buffer:
    memory: Memory
    copied: int
    """Event: what was in it is on the device."""


def _stream(
    session: Session, parts: Iterable[Part], weights: Mapping[str, DeviceArray], buffer_bytes: int, keep_cached: bool
) -> Iterator[Part]:
    """Bring parts to the device, two buffers in turn; yields each when its copy has been queued."""
    device = session.device
    buffers = [_Buffer(device.allocate_pinned(buffer_bytes), device.new_event()) for _ in range(2)]
    under_way: deque[tuple[_Buffer, Future[list[tuple[Part, int]]]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as reader:
        for filling, buffer in zip(_fillings(parts, buffer_bytes), cycle(buffers), strict=False):
            device.synchronize_event(buffer.copied)
            under_way.append((buffer, reader.submit(_read, filling, buffer.memory, keep_cached)))
            if len(under_way) == len(buffers):
                yield from _copy(session, *under_way.popleft(), weights)
        while under_way:
            yield from _copy(session, *under_way.popleft(), weights)
    device.synchronize(session.stream)
    for buffer in buffers:
        device.release(buffer.memory)


def _copy(
    session: Session, buffer: _Buffer, reading: Future[list[tuple[Part, int]]], weights: Mapping[str, DeviceArray]
) -> Iterator[Part]:
    """Queue the copies of what has been read into a buffer."""
    for part, place in reading.result():
        target = weights[part.spec.name].address + part.begin * (part.nbytes // part.size)
        session.device.copy(target, buffer.memory.address + place, part.nbytes, session.stream)
        yield part
    session.device.record(buffer.copied, session.stream)


def _fillings(parts: Iterable[Part], limit: int) -> Iterator[list[tuple[Part, int]]]:
    """Parts that one buffer holds, with their places in it, in the order of the files."""
    filling: list[tuple[Part, int]] = []
    place = 0
    for part in sorted(parts, key=lambda p: (p.source.file, p.offset)):
        if place + part.nbytes > limit:
            yield filling
            filling, place = [], 0
        filling.append((part, place))
        place += -(-part.nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    if filling:
        yield filling


def _read(filling: list[tuple[Part, int]], buffer: Memory, keep_cached: bool) -> list[tuple[Part, int]]:
    """Fill a buffer from the files, and check what must be right."""
    memory: NDArray[np.uint8] = np.asarray(HostView(buffer))
    targets = [memory[at : at + part.nbytes].view(numpy_dtype(part.spec.dtype)) for part, at in filling]
    pieces = [
        Piece(part.source.file, part.offset, part.source.dtype, target)
        for (part, _), target in zip(filling, targets, strict=True)
    ]
    read_into_place(pieces, keep_cached=keep_cached)
    for (part, _), target in zip(filling, targets, strict=True):
        check_scales(part.spec, target, part.begin)
    return filling


def _read_in_place(
    parts: Iterable[Part], weights: Mapping[str, DeviceArray], progress: Callable[[int], object], keep_cached: bool
) -> None:
    """Read parts of weights in pinned memory to where they stay."""
    targets = []
    for part in parts:
        weight = weights[part.spec.name]
        memory: NDArray[np.uint8] = np.asarray(HostView(Memory(weight.address, weight.nbytes, pinned=True)))
        targets.append((part, memory.view(weight.dtype)[part.begin : part.begin + part.size]))
    pieces = [Piece(p.source.file, p.offset, p.source.dtype, target) for p, target in targets]
    read_into_place(pieces, progress, keep_cached=keep_cached)
    for part, target in targets:
        check_scales(part.spec, target, part.begin)
