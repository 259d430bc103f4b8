"""Every custom op of a model run twice on the same inputs, by the reference and by the kernels, and compared.

Logits of BF16 cannot be compared by themselves: a choice of experts or blocks that is nearly a tie falls otherwise
after one rounding more, and moves all logits of its row. Here each op gets the inputs that really occur in the model,
so it inherits nobody's error, makes its choices from the same numbers, and has to be as near to the reference as the
kernel tests demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kernel_checks import assert_close
from torch import Tensor

from flashnext.export.ops import schema
from flashnext.export.ops.torch_ops import Implementation, reference

TOLERANCES = {"s_out": 1e-3, "recurrent_state_out": 5e-3}
"""Of float32 results that long steps in BF16 make of rounded operands, as in the kernel tests."""


class SideBySide:
    """An `Implementation`: the kernels', with each call compared to the reference's. `calls` counts them."""

    def __init__(self, kernels: Implementation) -> None:
        self.calls: Counter[str] = Counter()
        self._kernels = kernels

    def __call__(self, op: str, form: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Any:
        ports = schema.op(op).form(form)
        want = reference(op, form, [tensor.clone() for tensor in inputs], attributes)
        got = self._kernels(op, form, inputs, attributes)
        given = {port.name: tensor for port, tensor in zip(ports.inputs, inputs, strict=True)}
        rounded = next(t.dtype for p, t in zip(ports.inputs, inputs, strict=True) if p.dtype == "T") != torch.float32
        for port, *pair in zip(ports.outputs, _tensors(got), _tensors(want), strict=True):
            tolerance = TOLERANCES.get(port.name) if rounded else None
            assert_close(*_comparable(port.name, given, *pair), f"{op} {form}: {port.name}", tolerance)
        self.calls[op] += 1
        return got


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _comparable(name: str, given: Mapping[str, Tensor], got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen blocks as sets; of pending tokens those that the next step may keep."""
    if name == "blocks_out":
        return got.sort(-1).values, want.sort(-1).values
    if name != "pending_state_out":
        return got, want
    got, want, steps = got.clone(), want.clone(), given["qkv"].shape[1]
    for slot, new in zip(given["slots"].tolist(), given["new_len"].tolist(), strict=True):
        if new:
            unread = slice(new if steps <= got.shape[1] else 0, None)
            got[slot, unread] = want[slot, unread] = 0
    return got, want
