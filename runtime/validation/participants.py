"""What takes part in a comparison, as runners of Polygraphy: engines, and outputs that were saved."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from flashnext.export.graphs.manifest import GraphSpec
from flashnext.runtime.engines.base import Array, Engine, numpy_dtype
from flashnext.runtime.validation.steps import Step

FED_ROLES = ("step", "rows", "edge")


class StepRunner(BaseRunner):  # type: ignore[misc]
    """A runner whose inferences are the steps of one graph, in order."""

    def __init__(self, name: str, spec: GraphSpec) -> None:
        super().__init__(name=name, prefix=name)
        self._spec = spec
        self._next = 0

    def activate_impl(self) -> None:
        """Start over: the first inference is the first step."""
        self._next = 0

    def get_input_metadata_impl(self) -> TensorMetadata:
        """What a step feeds; weights and states are bound already."""
        metadata = TensorMetadata()
        for spec in self._spec.inputs:
            if spec.role in FED_ROLES:
                shape = tuple(d if isinstance(d, int) else None for d in spec.shape)
                metadata.add(spec.name, numpy_dtype(spec.dtype), shape)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        """Outputs of the next step."""
        number, self._next = self._next, self._next + 1
        start = time.perf_counter()
        outputs = self.outputs(number, feed_dict)
        self.inference_time = time.perf_counter() - start
        return OrderedDict(outputs)

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Outputs of a step by name."""
        raise NotImplementedError


class EngineRunner(StepRunner):
    """One of our engines; its states live as long as the runner's owner keeps them."""

    def __init__(self, name: str, engine: Engine, steps: Sequence[Step]) -> None:
        super().__init__(name, engine.spec)
        self._engine = engine
        self._steps = steps

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run the step; positions without a token read as zero, because nobody may read them."""
        return masked(self._engine.spec, self._steps[number], self._engine.run(feeds))


class SavedRunner(StepRunner):
    """Outputs of an earlier run, one mapping for each step."""

    def __init__(self, name: str, spec: GraphSpec, saved: Sequence[Mapping[str, Array]]) -> None:
        super().__init__(name, spec)
        self._saved = saved

    def outputs(self, number: int, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """What was saved of the step."""
        return self._saved[number]


def masked(spec: GraphSpec, step: Step, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs whose positions without a token read as zero."""
    by_token = {t.name for t in spec.outputs if t.shape[:2] == ("B", "S")}
    return {name: _masked(value, step) if name in by_token else value for name, value in outputs.items()}


def _masked(value: Array, step: Step) -> Array:
    keep = step.valid.reshape(*step.valid.shape, *[1] * (value.ndim - 2))
    return np.where(keep, value, np.zeros((), value.dtype))
