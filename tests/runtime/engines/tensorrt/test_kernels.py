"""Kernels that the engine launches itself: in the order of their stream, and again from a captured graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import CudaOnHost
from onnxruntime_plans import module

from flashnext.export.errors import EngineError
from flashnext.plugins import host_build
from flashnext.runtime.engines.tensorrt.cuda_device import CudaDevice
from flashnext.runtime.engines.tensorrt.host_device import HostDevice
from flashnext.runtime.engines.tensorrt.kernels import Kernels
from flashnext.runtime.engines.tensorrt.plan import Library
from flashnext.runtime.engines.tensorrt.session import Session

F32, INT = np.dtype(np.float32), np.dtype(np.int32)


def make_session(kernel_library: Path, seed: int | None = None) -> Session:
    device = HostDevice(seed)
    return Session(device, Library("tensorrt", module), Kernels(device, kernel_library))


def candidates_values(session: Session, rows: int, vocabulary: int, count: int) -> dict[str, Any]:
    shapes = {"logits": (rows, vocabulary), "values": (rows, count), "indices": (rows, count), "sums": (rows,)}
    values: dict[str, Any] = {n: session.array(s, INT if n == "indices" else F32) for n, s in shapes.items()}
    return values | {"inverse_temperature": 1.0}


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_launch_has_its_place_among_the_copies_of_its_stream(kernel_library: Path, seed: int | None) -> None:
    """Inputs are copied before it, results behind it, and nobody waits in between."""
    session = make_session(kernel_library, seed)
    assert session.kernels is not None
    values = candidates_values(session, 2, 9000, 5)
    launch = session.kernels.prepare("candidates", values, session.stream)
    generator = np.random.default_rng(3)
    given = [generator.normal(size=(2, 9000)).astype(np.float32) for _ in range(3)]
    found = []
    for logits in given:
        session.device.copy(values["logits"].address, logits.ctypes.data, logits.nbytes, session.stream)
        launch()
        found.append(session.result(values["indices"].address, (2, 5), INT))
    session.device.synchronize(session.stream)
    for logits, indices in zip(given, found, strict=True):
        np.testing.assert_array_equal(indices, np.argsort(-logits, axis=1, kind="stable")[:, :5])


def test_a_captured_launch_runs_again(kernel_library: Path) -> None:
    session = make_session(kernel_library)
    assert session.kernels is not None
    values = candidates_values(session, 1, 100, 3)
    launch = session.kernels.prepare("candidates", values, session.stream)
    graph = session.device.capture(session.stream, launch)
    session.device.synchronize(session.stream)
    assert not values["indices"].copy().any()  # capturing runs nothing
    values["logits"][:] = np.arange(100)
    session.device.launch(graph, session.stream)
    np.testing.assert_array_equal(values["indices"].copy(), [[99, 98, 97]])


def test_the_kernels_are_told_their_stream(kernel_library: Path) -> None:
    """Which the host execution has no use for: on a GPU they would run on another one, and outside of a capture."""
    session = make_session(kernel_library)
    assert session.kernels is not None
    for stream in (session.stream, session.side):
        launch = session.kernels.prepare("candidates", candidates_values(session, 1, 100, 3), stream)
        assert launch._struct.stream == stream


def test_launches_of_a_stream_share_a_workspace_that_grows(kernel_library: Path) -> None:
    session = make_session(kernel_library)
    assert session.kernels is not None
    device = session.device
    taken = []
    for rows in (2, 1, 3, 4):
        values = candidates_values(session, rows, 100, 3)
        free = device.free_bytes()
        session.kernels.prepare("candidates", values, session.stream)
        taken.append(free - device.free_bytes())
    first = taken[0]
    assert taken == [first, 0, 2 * first, 0]
    session.kernels.prepare("candidates", candidates_values(session, 1, 100, 3), session.side)


def test_on_cuda_the_library_is_called_at_once() -> None:
    called = []
    CudaDevice(CudaOnHost(HostDevice())).queue(1, lambda: called.append(1))
    assert called == [1]


@pytest.mark.usefixtures("kernel_library")  # or there is no compiler
def test_a_library_of_another_version_is_refused() -> None:
    """An engine finds the library that it was built with, whose kernels may be older than what calls them."""
    other = host_build.build("plain", [host_build.SOURCES / "ngram_rows/kernel.cu"])
    session = make_session(other)
    assert session.kernels is not None
    with pytest.raises(EngineError, match=r"library .*\.so has no kernel candidates, or another version's\. Build it"):
        session.kernels.prepare("candidates", candidates_values(session, 1, 100, 3), session.stream)


def test_values_that_do_not_fit_are_refused(kernel_library: Path, tmp_path: Path) -> None:
    session = make_session(kernel_library)
    assert session.kernels is not None
    values = candidates_values(session, 1, 100, 3)
    wrong = values | {"indices": session.array((1, 4), INT)}
    with pytest.raises(EngineError, match=r"candidates cannot be launched: .* must have shape .* found"):
        session.kernels.prepare("candidates", wrong, session.stream)
    with pytest.raises(EngineError, match="not contiguous"):
        session.kernels.prepare("candidates", values | {"logits": np.zeros((1, 200), np.float32)[:, ::2]}, 1)
    large = candidates_values(session, 1, 600, 600)
    session.kernels.prepare("candidates", large, session.stream)()
    with pytest.raises(EngineError, match="candidates cannot be launched: Candidates: count must be 1 to 512"):
        session.device.synchronize(session.stream)
    with pytest.raises(EngineError, match=r"kernels of .*none\.so cannot be loaded"):
        Kernels(session.device, tmp_path / "none.so")
