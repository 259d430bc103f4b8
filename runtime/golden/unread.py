"""Which rows of a state nobody reads after a step: each engine leaves there what it likes, so nothing is saved of them.

The last slot takes what padding rows would write, the last row of what is addressed by position what padding tokens
would. Pending rows behind the step's tokens are older ones; after a long step nothing is pending.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flashnext.runtime.engines.base import Array
from flashnext.runtime.validation.steps import Step

BY_POSITION = ("key_state", "value_state", "index_key_state")
PENDING = "pending_state"


def without_unread(name: str, state: Array, slots: Iterable[int], step: Step, window: int) -> Array:
    """A copy of a state after a step, with NaN in the rows that nobody reads."""
    state = np.array(state)
    nothing = np.array(np.nan, state.dtype)
    kind = name.rsplit(".", 1)[-1]
    state[-1] = nothing
    if kind in BY_POSITION:
        state[:, -1] = nothing
    if kind == PENDING:
        kept = step.tokens if step.tokens <= window else 0
        state[list(slots), kept:] = nothing
    return state
