"""Lets the kernel tests run on a GPU: takes the cases' CPU tensors there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from flashnext.plugins.device_library import DeviceKernels
from flashnext.plugins.host_library import Execution, HostKernels, Report


class OnDevice(HostKernels):
    """Stands in for the host execution's kernels. There are no schedules; what needs counting is skipped."""

    def __init__(self) -> None:
        self.kind = "device"
        self._kernels = DeviceKernels.load(lambda size: torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"))

    def launch(self, op: str, values: Mapping[str, Any], execution: Execution | None = None) -> Report:
        if execution and execution.watch == "sectors":
            pytest.skip("a GPU does not count sectors")
        there = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in values.items()}
        self._kernels.launch(op, there, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        for name, value in values.items():
            if isinstance(value, Tensor):
                value.copy_(there[name])
        return Report(0, 0, 0, 0, 0, 0)
