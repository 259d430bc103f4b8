"""One graph of a bundle on a GPU: see `Engine`.

A step copies its small inputs in one piece, binds everything by address and queues one run. Results that another graph
takes (`resident`) stay where they are; the others are copied to pinned memory, and only then does the host wait. A
decode shape that comes up again is captured as a CUDA graph: the first run of a shape lets TensorRT do what it defers,
and after the second the same run is captured, so that no step is lost to capturing.

Logits stay on the device where the engine has kernels of its own: a row in float32 is 1 MB at a vocabulary of 248,320,
and of it the largest go to the host (candidates.py). Without (TensorRT for RTX) rows are copied whole.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flashnext.builder.engine_manifest import EngineGraph, Profile
from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import GraphSpec, TensorSpec
from flashnext.runtime.engines.base import Array, check_array, numpy_dtype
from flashnext.runtime.engines.tensorrt.arrays import Buffer, DeviceArray, Joined
from flashnext.runtime.engines.tensorrt.candidates import FORMATS, CandidateSelection
from flashnext.runtime.engines.tensorrt.plan import Context, Plan
from flashnext.runtime.engines.tensorrt.session import Session
from flashnext.runtime.engines.tensorrt.shapes import choose, most_bytes, plan_form
from flashnext.runtime.engines.tensorrt.staging import Staging
from flashnext.runtime.engines.tensorrt.states import DeviceState

MAX_GRAPHS = 64
"""Captured graphs of one graph of the bundle; the least recently used go first."""
CAPTURED_AFTER = 2
"""Runs of a shape after which it is captured."""
LOGITS = "logits"
LOGGER = logging.getLogger("flashnext.tensorrt")

Fed = Array | DeviceArray | Joined
Key = tuple[Any, ...]


class TensorRTEngine:
    """One graph of a bundle.

    Args:
        graph: what the engine folder says of it.
        plans: its plans by file.
        window: steps of at most this many tokens a sequence are decode steps.
        resident: outputs that stay on the device, as `DeviceArray`s, until the graph runs again; "logits" as
            `DeviceLogits`, where there is a kernel for them.
    """

    def __init__(
        self,
        spec: GraphSpec,
        graph: EngineGraph,
        plans: Mapping[str, Plan],
        session: Session,
        window: int,
        resident: frozenset[str] = frozenset(),
    ) -> None:
        self.spec = spec
        self._graph, self._session, self._window = graph, session, window
        self._resident = resident - {LOGITS}
        self._inputs = {t.name: t for t in spec.inputs}
        self._small = {t.name for t in spec.inputs if _is_small(t)}
        self._shapes = {t.name: plan_form(t, graph.codes)[1] for t in spec.inputs}
        self._contexts = {(p.plan, p.index): _context(p, plans[p.plan], session) for p in graph.profiles}
        self._extra = set(graph.weights) - self._inputs.keys()
        self._states: dict[str, DeviceState] = {}
        self._turning: list[DeviceState] = []
        self._bound: dict[str, int] = {}
        self._outputs = {
            t.name: session.buffer(output_bytes(t, spec, graph)) for t in spec.outputs if t.role != "state"
        }
        self._candidates = self._new_selection() if LOGITS in resident else None
        self._larger: dict[str, Buffer] = {}
        self._kept = (self._resident | ({LOGITS} if self._candidates else set())) & self._outputs.keys()
        self.consumed = session.device.new_event()
        """Event: the last run, which reads its inputs, is done."""
        self._ids = self._staging([t for t in spec.inputs if _is_small(t)], on_side=False)
        self._large: dict[str, Staging] = {}
        self._captured: OrderedDict[Key, int] = OrderedDict()
        self._runs: Counter[Key] = Counter()
        self._forms: dict[Key, tuple[dict[str, int], Profile]] = {}
        self.capture_failure = ""
        """Why no graphs are captured any more."""

    def bind(self, tensors: Mapping[str, Array | DeviceArray | DeviceState]) -> None:
        """See `Engine.bind`; takes arrays that are on the device already, too."""
        for name, tensor in tensors.items():
            if name not in self._inputs and name not in self._extra:
                continue
            if name in self._inputs:
                check_array(self._inputs[name], tensor.current if isinstance(tensor, DeviceState) else tensor)
            if isinstance(tensor, DeviceState):
                self._set_state(name, tensor)
                continue
            array = tensor if isinstance(tensor, DeviceArray) else self._session.upload(tensor)
            if name in self.spec.states:
                self._set_state(name, self._new_state(array))
            else:
                self._bound[name] = array.address

    def run(self, feeds: Mapping[str, Fed]) -> dict[str, Any]:
        """See `Engine.run`; outputs that stay on the device are `DeviceArray`s, and may be fed to other graphs.

        Raises:
            EngineError: a step that no profile takes, or a failure of TensorRT or CUDA, with its reasons.
        """
        sizes, profile = self._prepared(feeds)
        addresses = self._stage(feeds)
        for name in self._kept:
            self._outputs[name].generation += 1
        self._run(profile, sizes, addresses)
        for state in self._turning:
            state.ran()
        self._session.device.record(self.consumed, self._session.stream)
        return self._collect(sizes)

    @property
    def whole_rows(self) -> int:
        """Rows of logits that somebody wanted whole though their largest were there."""
        return self._candidates.whole_rows if self._candidates else 0

    def close(self) -> None:
        """Let go of captured graphs and pinned memory; the engine cannot be used afterwards."""
        while self._captured:
            self._session.device.release_graph(self._captured.popitem()[1])
        for staging in (self._ids, *self._large.values()):
            staging.release()

    def _prepared(self, feeds: Mapping[str, Fed]) -> tuple[dict[str, int], Profile]:
        """The step's sizes and its profile: checked once for each set of shapes, since few come up again and again."""
        form = tuple([(name, value.shape, value.dtype) for name, value in feeds.items()])
        if form not in self._forms:
            sizes: dict[str, int] = {}
            for name, value in feeds.items():
                sizes |= check_array(self._inputs[name], value)
            self._forms[form] = sizes, choose(self.spec, self._graph, self._window, sizes)
        return self._forms[form]

    # --- inputs ---------------------------------------------------------------

    def _set_state(self, name: str, state: DeviceState) -> None:
        self._states[name] = state
        self._turning = [state for state in self._states.values() if not state.in_place]

    def _new_state(self, first: DeviceArray) -> DeviceState:
        return DeviceState(first, None if self._graph.in_place else self._session.array(first.shape, first.dtype))

    def _stage(self, feeds: Mapping[str, Fed]) -> dict[str, int]:
        """Bring what is fed to the device; addresses by input."""
        addresses = {}
        ids: dict[str, Array] = {}
        for name, value in feeds.items():
            if isinstance(value, DeviceArray) and value.aligned:
                addresses[name] = value.address
            elif name in self._small:
                ids[name] = value.copy() if isinstance(value, DeviceArray) else value  # type: ignore[assignment]
                addresses[name] = self._ids.address(name)
            else:
                addresses[name] = self._place(name, value)
        self._ids.put(ids)
        return addresses

    def _place(self, name: str, value: Fed) -> int:
        """A large input in a place of its own."""
        if name not in self._large:
            self._large[name] = self._staging([self._inputs[name]], on_side=True)
        place = self._large[name]
        address = place.address(name)
        if isinstance(value, DeviceArray):
            self._session.device.copy(address, value.address, value.nbytes, self._session.stream)
        elif isinstance(value, Joined):
            row_bytes = value.width * math.prod(value.shape[2:]) * value.dtype.itemsize
            for number, row in enumerate(value.rows):
                target = address + number * row_bytes
                self._session.device.copy(target, row.address, row.nbytes, self._session.stream)
        else:
            place.put({name: value})
        return address

    def _staging(self, specs: list[TensorSpec], on_side: bool) -> Staging:
        sizes = {t.name: most_bytes(t, self.spec, self._graph) for t in specs}
        return Staging(self._session, sizes, self.consumed, on_side=on_side)

    # --- running --------------------------------------------------------------

    def _run(self, profile: Profile, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        """Queue the step: a captured graph of it, or a run that may be captured for the next time."""
        stream = self._session.stream
        turned = tuple([s.current.address for s in self._turning])
        key = (*sorted(sizes.items()), *addresses.values(), turned)
        if key in self._captured:
            self._captured.move_to_end(key)
            self._session.device.launch(self._captured[key], stream)
            return
        context = self._contexts[profile.plan, profile.index]
        for name, address in {**self._bound, **addresses}.items():
            context.set_address(name, address)
        for name in addresses:
            context.set_shape(name, [sizes[d] if isinstance(d, str) else d for d in self._shapes[name]])
        for name, state in self._states.items():
            context.set_address(name, state.current.address)
            context.set_address(self.spec.states[name], state.target.address)
        for spec in self.spec.outputs:
            if spec.name in self._outputs:
                context.set_address(spec.name, self._buffer(spec, sizes).memory.address)
        queue = self._queued(context, sizes)
        queue()
        self._runs[key] += 1
        if profile.name == "decode" and self._runs[key] >= CAPTURED_AFTER and not self.capture_failure:
            self._capture(context, key, queue)

    def _queued(self, context: Context, sizes: Mapping[str, int]) -> Callable[[], None]:
        """Queues a run, and behind it the kernel that picks the largest logits."""
        stream, selection = self._session.stream, self._selection(sizes)
        if selection is None:
            return partial(context.execute, stream)
        launch = selection.launch(sizes["N"])

        def queue() -> None:
            context.execute(stream)
            launch()

        return queue

    def _capture(self, context: Context, key: Key, queue: Callable[[], None]) -> None:
        """Capture the run that was just queued, for the next step like it; without it, steps cost more host time."""
        device, stream = self._session.device, self._session.stream
        if not context.capturable(stream):
            return
        try:
            self._captured[key] = device.capture(stream, queue)
        except EngineError as cause:
            self.capture_failure = str(cause)
            LOGGER.warning("Steps of %s run without CUDA graphs: %s", self.spec.file, cause)
            return
        if len(self._captured) > MAX_GRAPHS:
            device.synchronize(stream)
            device.release_graph(self._captured.popitem(last=False)[1])

    def _buffer(self, spec: TensorSpec, sizes: Mapping[str, int]) -> Buffer:
        """Where an output goes: its usual place, or one for the logits of a whole chunk, made when first needed."""
        needed = math.prod(sizes[d] if isinstance(d, str) else d for d in spec.shape) * numpy_dtype(spec.dtype).itemsize
        if needed <= self._outputs[spec.name].memory.nbytes:
            return self._outputs[spec.name]
        if spec.name not in self._larger:
            self._larger[spec.name] = self._session.buffer(most_bytes(spec, self.spec, self._graph))
        return self._larger[spec.name]

    def _new_selection(self) -> CandidateSelection | None:
        """None where there is no kernel."""
        session, spec = self._session, next((t for t in self.spec.outputs if t.name == LOGITS), None)
        if session.kernels is None or spec is None or spec.dtype not in FORMATS:
            return None
        buffer, dtype, vocabulary = self._outputs[LOGITS], numpy_dtype(spec.dtype), int(spec.shape[-1])
        rows = buffer.memory.nbytes // (vocabulary * dtype.itemsize)
        return CandidateSelection(session, session.kernels, buffer, vocabulary, dtype, rows)

    def _selection(self, sizes: Mapping[str, int]) -> CandidateSelection | None:
        """None where rows go to the host whole: all of a chunk's, for a score, have no use for the largest."""
        return self._candidates if self._candidates and sizes["N"] <= self._candidates.rows else None

    def _collect(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """The outputs that are not states; waits for the device if one of them goes to the host."""
        session, found = self._session, dict[str, Any]()
        for spec in self.spec.outputs:
            if spec.name not in self._outputs:
                continue
            buffer, dtype = self._buffer(spec, sizes), numpy_dtype(spec.dtype)
            shape = [sizes[d] if isinstance(d, str) else d for d in spec.shape]
            if spec.name in self._resident:
                address = buffer.memory.address
                found[spec.name] = DeviceArray(session.device, session.stream, address, shape, dtype, buffer)
            elif spec.name == LOGITS and (selection := self._selection(sizes)):
                found[spec.name] = selection.collect(sizes["N"])
            else:
                found[spec.name] = session.result(buffer.memory.address, shape, dtype)
        if any(not isinstance(value, DeviceArray) for value in found.values()):
            session.device.synchronize(session.stream)
        return found


def _context(profile: Profile, plan: Plan, session: Session) -> Context:
    context = plan.context(profile.index, session.stream)
    session.attach(context, plan.scratch_bytes())
    return context


def output_bytes(tensor: TensorSpec, spec: GraphSpec, graph: EngineGraph) -> int:
    """Bytes of an output's usual place. A prompt's step wants one row of logits; a score wants all of its chunk's (half
    a gigabyte at 512 tokens), and gets a place of its own."""
    return most_bytes(tensor, spec, graph, "decode" if "N" in tensor.shape else "") or most_bytes(tensor, spec, graph)


def _is_small(spec: TensorSpec) -> bool:
    """Ids and lengths, which travel together."""
    return spec.role == "step" and spec.dtype == "int32"
