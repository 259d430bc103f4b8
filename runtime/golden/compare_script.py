"""Comparison function for `polygraphy run --compare-func-script`; it lies in a folder of golden files as compare.py.

    polygraphy run GRAPH --trt … --load-inputs body/inputs --load-outputs body/outputs --compare-func-script compare.py

It needs Polygraphy and numpy only. Errors are related to the standard deviation of the saved output, as `flashnext
validate` relates them, and the first output beyond the tolerance names the module to look at. Tolerance and names come
from `golden.json` beside it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAVED = "pytorch"
"""Name of the runner whose outputs were saved."""
FACTS = "golden.json"


def compare_outputs(first: Mapping[str, Any], second: Mapping[str, Any]) -> OrderedDict[str, bool]:
    """Whether each output that both have is within the tolerance; prints those that are not, and where to look."""
    facts = json.loads(Path(__file__).with_name(FACTS).read_text(encoding="utf-8"))
    saved, other = (first, second) if getattr(first, "runner_name", "") == SAVED else (second, first)
    suspects, tolerance = facts["suspects"], facts["tolerance"]
    both = [name for name in saved if name in other]
    order = {name: place for place, name in enumerate(suspects)}
    found: OrderedDict[str, bool] = OrderedDict()
    for name in sorted(both, key=lambda n: order.get(n, len(order))):
        error = relative_error(_array(saved[name]), _array(other[name]))
        found[name] = error <= tolerance
        if not found[name]:
            first_one = sum(not passed for passed in found.values()) == 1
            hint = f" Look at {suspects[name]}." if first_one and name in suspects else ""
            print(f"DIFFERS: {name}: {error:.2e} deviations, tolerance {tolerance:.1e}.{hint}")
    return found


def relative_error(saved: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest error in standard deviations of what was saved and is not zero; integers have to be equal.

    Saved NaN stands where nobody reads. Most of a state is memory that no step has used, so zeros say nothing about
    the size of its values.
    """
    if saved.shape != other.shape:
        return float("inf")
    exact = np.issubdtype(saved.dtype, np.integer)
    if exact:
        saved, other = np.sort(saved), np.sort(other)  # the chosen blocks are sets
    wide = saved.astype(np.float64)
    read = ~np.isnan(wide)
    error, used = np.abs(wide - other.astype(np.float64))[read], wide[read & (wide != 0)]
    deviation = 1.0 if exact or not used.size else float(used.std()) or 1.0
    return float(error.max(initial=0.0)) / deviation


def _array(value: Any) -> NDArray[Any]:
    """Polygraphy gives tensors of PyTorch where a dtype is one that numpy lacks."""
    return value if isinstance(value, np.ndarray) else value.detach().cpu().float().numpy()
