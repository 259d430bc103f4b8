"""The engine protocol: a graph that can be run; everything that it remembers is owned by the caller.

An engine is one graph of a bundle ("head", "body", "mtp", "mtp_draft"). Weights and states are numpy arrays bound
once by name; a state is updated in place. Each step feeds the remaining inputs and gets the outputs.
Implementations: onnxruntime.py (portable graphs), torch_engine.py (the PyTorch model that the graphs were traced from).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashnext.export.errors import EngineError
from flashnext.export.graphs.manifest import GraphSpec, TensorSpec

Array = NDArray[Any]
MOST_THREADS = 1024
"""Of an engine: asked for a million, some start them until the machine has none left for anybody."""


class Engine(Protocol):
    """One graph, ready to run. An engine on a device may say `states_elsewhere = True`: see `bind`."""

    spec: GraphSpec

    def bind(self, tensors: Mapping[str, Array]) -> None:
        """Bind weights and states by input name; they stay bound, and states are written in place.

        An engine on a GPU takes states as their first values and keeps them there: the arrays do not change.

        Raises:
            EngineError: an array's dtype, shape or layout is not what the graph takes.
        """

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run one step; `feeds` holds every input that is not bound. Returns the outputs that are not states.

        An engine on a device may leave some there, as things that can be cut like arrays and fed to other graphs, and
        give `flashnext.runtime.logits.LogitRows` for logits.
        """


DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "int32": np.int32,
    "int64": np.int64,
    "int8": np.int8,
    "uint8": np.uint8,
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy dtype of a manifest's dtype name; bfloat16 and the 8-bit floats come from ml_dtypes."""
    if name in DTYPES:
        dtype: np.dtype[Any] = np.dtype(DTYPES[name])
        return dtype
    import ml_dtypes

    extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return extended


def check_array(spec: TensorSpec, array: Any) -> dict[str, int]:
    """The sizes that an array gives to the dimensions with names.

    Raises:
        EngineError: its dtype or shape is not what the graph takes.
    """
    fits = len(array.shape) == len(spec.shape) and all(
        isinstance(want, str) or want == have for want, have in zip(spec.shape, array.shape, strict=True)
    )
    if array.dtype != numpy_dtype(spec.dtype) or not fits:
        raise EngineError(
            f"{spec.name} must be {spec.dtype} of shape {list(spec.shape)}, "
            f"found {array.dtype.name} of shape {list(array.shape)}."
        )
    return {d: n for d, n in zip(spec.shape, array.shape, strict=True) if isinstance(d, str)}
