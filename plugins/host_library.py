"""Launches the kernels' host execution on arrays in memory.

    kernels = HostKernels.load()
    report = kernels.launch("gated_residual", {"r": r, "y": y, …, "eps": 1e-6})   # fields of gated_residual/params.h

Outputs and states are written in place. The workspace is filled with NaN first, as is every block's shared memory, so
what a kernel reads without having written it shows in the results. `Execution` says in which order threads run and what
is watched; a `Report` says what the launch read and wrote.

With `kind="address"` or `"thread"` every launch runs in a process of its own, in the program that is built with that
sanitizer, and what the sanitizer finds is raised as a `KernelError`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashnext.plugins.host_build import SOURCES, build
from flashnext.plugins.kernel_library import KernelLibrary, raise_for
from flashnext.plugins.params import Params, address, byte_count
from flashnext.plugins.replay import Buffer, replay

SCHEDULES = {"forward": 0, "backward": 1, "priority": 2, "uniform": 3}
LATE_COPIES = {"never": 0, "always": 1, "sometimes": 2}
WATCH = {"nothing": 0, "sectors": 1, "conflicts": 2}


@dataclass(frozen=True)
class Execution:
    """How a launch runs: see plugins/host/runtime.h and counting.h."""

    schedule: str = "priority"
    seed: int = 1
    late_copies: str = "sometimes"
    watch: str = "nothing"


class Report(NamedTuple):
    """What the kernels of one call read and wrote; zeros unless `watch` is "sectors"."""

    launches: int
    loaded_bytes: int
    stored_bytes: int
    loaded_sectors: int
    stored_sectors: int
    sectors: int


class HostKernels(KernelLibrary):
    """A kernel library for the host execution."""

    def __init__(self, path: Path, kind: str, folder: Path, replay_program: Path | None = None) -> None:
        super().__init__(path, folder)
        self.kind, self._replay_program = kind, replay_program
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        kind: str = "plain",
        kernels: Sequence[Path] | None = None,
        folder: Path = SOURCES,
        flags: Sequence[str] = (),
    ) -> HostKernels:
        """Build (if need be) and load the kernels of all ops, or those given with their params under `folder`.

        Raises:
            PluginError: they cannot be built here.
        """
        program = None if kind == "plain" else build(kind, kernels, flags)
        return cls(build("plain", kernels, flags), kind, folder, program)

    def launch(self, op: str, values: Mapping[str, Any], execution: Execution | None = None) -> Report:
        """Run the op on these arrays and attributes.

        Raises:
            PluginError: the arguments do not fit the op.
            KernelError: the kernel failed.
        """
        execution = execution or Execution()
        struct, workspace = self.prepare(op, values, lambda size: np.full(size, 0xFF, np.uint8))
        if self._replay_program:
            buffers = self._buffers(self.params(op), {**values, "workspace": workspace})
            totals = self._replay(op, struct, buffers, execution)
        else:
            totals = self._launch(op, struct, execution)
        return Report(*totals)

    def _launch(self, op: str, struct: ctypes.Structure, execution: Execution) -> list[int]:
        totals = (ctypes.c_uint64 * 6)()
        with self._lock:  # the host runtime has one grid under way
            self._library.simt_configure(
                SCHEDULES[execution.schedule], ctypes.c_uint64(execution.seed), LATE_COPIES[execution.late_copies]
            )
            self._library.simt_watch(WATCH[execution.watch])
            status, message = self.call(op, struct)
            self._library.simt_counts(totals)
            self._library.simt_watch(WATCH["nothing"])
        raise_for(status, message)
        return list(totals)

    def _replay(
        self, op: str, struct: ctypes.Structure, buffers: Sequence[Buffer], execution: Execution
    ) -> Sequence[int]:
        assert self._replay_program
        numbers = (SCHEDULES[execution.schedule], LATE_COPIES[execution.late_copies], execution.seed)
        # Under ThreadSanitizer the watching itself, which all threads share, would be reported.
        watch = WATCH["nothing" if self.kind == "thread" else execution.watch]
        result = replay(self._replay_program, op, struct, buffers, (*numbers, watch))
        raise_for(result.status, result.message)
        return result.totals

    def _buffers(self, params: Params, values: Mapping[str, Any]) -> list[Buffer]:
        return [
            Buffer(getattr(params.struct, f.name).offset, address(values[f.name]), byte_count(values[f.name]))
            for f in params.fields
            if f.kind in ("tensor", "bytes") and values.get(f.name) is not None
        ]
