"""What the kernel tests share: a case is one launch with its inputs and what the PyTorch reference makes of them.

Outputs start as NaN (every bit set), so an element that a kernel does not write fails. States start as whatever the
case says and are compared in full: what the op must not touch has to stay, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from flashnext.plugins.host_library import Execution, HostKernels, Report

EXAMPLES = settings(max_examples=int(os.environ.get("FLASHNEXT_EXAMPLES", "10")), deadline=None)
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 1e-2
BF16_STEPS = 8
BF16_MANTISSA_BITS = 7


@dataclass
class Case:
    """`values`: the launch's arguments; `expected`: the fields to compare; `ignored`: masks of what may be anything;
    `tolerances`: of float32 fields that are made of rounded operands, relative to the norm."""

    op: str
    values: dict[str, Any]
    expected: dict[str, Tensor]
    ignored: dict[str, Tensor] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)

    def run(self, kernels: HostKernels, execution: Execution | None = None) -> tuple[dict[str, Tensor], Report]:
        """Launch on copies; returns the compared fields afterwards."""
        values = {n: v.clone() if isinstance(v, Tensor) else v for n, v in self.values.items()}
        report = kernels.launch(self.op, values, execution)
        return {name: values[name] for name in self.expected}, report

    def check(self, kernels: HostKernels, execution: Execution | None = None) -> Report:
        """Launch, and compare with what is expected."""
        outputs, report = self.run(kernels, execution)
        for name, want in self.expected.items():
            got = outputs[name]
            if name in self.ignored:
                got, want = (t.masked_fill(self.ignored[name], 0) for t in (got, want))
            assert_close(got, want, name, self.tolerances.get(name))
        return report


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that nobody has written: every bit set."""
    out = torch.empty(shape, dtype=dtype)
    out.view(torch.uint8).fill_(0xFF)
    return out


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_close(got: Tensor, want: Tensor, what: str, tolerance: float | None = None) -> None:
    """Float: relative to the norm of the whole. BF16: also every element, in steps of its row's largest value.

    Integers and FP8 have to be equal.
    """
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.dtype not in (torch.float32, torch.bfloat16):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{what} differs"
        return
    exact, wanted = got.double(), want.double()
    assert torch.equal(exact.isnan(), wanted.isnan()), f"{what}: NaN in other places than expected"
    error, size = (exact - wanted).nan_to_num(), wanted.nan_to_num()
    tolerance = tolerance or (FP32_TOLERANCE if got.dtype == torch.float32 else BF16_TOLERANCE)
    assert error.norm() <= tolerance * size.norm() + 1e-30, f"{what}: {error.norm() / size.norm():.2e} of the norm"
    if got.dtype == torch.bfloat16 and got.numel():
        largest = size.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        step = torch.exp2(largest.log2().floor() - BF16_MANTISSA_BITS)
        assert (error.abs() <= BF16_STEPS * step).all(), f"{what}: {(error.abs() / step).max():.1f} BF16 steps"


def assert_deterministic(case: Case, kernels: HostKernels, schedules: int = 20) -> None:
    """The same bits under random schedules of threads and blocks, and no two blocks that touch one byte in conflict."""
    first, _ = case.run(kernels, Execution(watch="conflicts"))
    for seed in range(schedules):
        kind = ("priority", "uniform", "forward", "backward")[seed % 4]
        again, _ = case.run(kernels, Execution(kind, seed + 2))
        assert_same_bits(again, first)


def assert_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name in want:
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), f"{name} has other bits"
