"""The host execution itself: it computes what a GPU would, and it catches one mistake of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_checks import Case, assert_close, assert_deterministic, poisoned

from flashnext.export.errors import PluginError
from flashnext.plugins import host_build
from flashnext.plugins.host_library import Execution, HostKernels
from flashnext.plugins.kernel_library import KernelError
from flashnext.plugins.params import read_params

HARNESS = Path(__file__).parent / "harness"
FAULTS = (
    "none",
    "missing barrier",
    "missing reuse barrier",
    "bound",
    "shared bound",
    "fragment",
    "missing atomic",
    "divergent barrier",
    "deadlock",
    "shuffle mask",
    "block conflict",
    "misaligned",
    "missing copy wait",
    "unwritten",
    "shared total",
    "shared most",
)


@pytest.fixture(scope="module")
def probe() -> HostKernels:
    return load("plain")


def load(kind: str) -> HostKernels:
    return HostKernels.load(kind, [HARNESS / "probe/kernel.cu"], HARNESS)


def case(fault: str = "none") -> Case:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(3, 300, generator=g)
    a, b = (torch.randn(rows, 16, generator=g).bfloat16() for rows in (16, 8))
    bins = torch.bincount((x[0] * 4).int(), minlength=4).int()
    outputs = {"sums": poisoned(3), "product": poisoned(16, 8), "bins": poisoned(4, dtype=torch.int32)}
    values = {"x": x, "a": a, "b": b, **outputs, "fault": FAULTS.index(fault)}
    return Case("probe", values, {"sums": x.sum(1), "product": a.float() @ b.float().T, "bins": bins})


# --- without a mistake ------------------------------------------------------------------------------


def test_results_are_right_under_every_schedule(probe: HostKernels) -> None:
    case().check(probe)
    assert_deterministic(case(), probe)


@pytest.mark.parametrize("late", ["never", "always"])
def test_copies_may_run_early_or_late(probe: HostKernels, late: str) -> None:
    case().check(probe, Execution(late_copies=late))


def test_bytes_and_sectors_are_counted(probe: HostKernels) -> None:
    _, report = case().run(probe, Execution(watch="sectors"))
    assert report.launches == 4
    assert report.loaded_bytes == 3 * 300 * 4 + (256 + 128) * 2 + 300 * 4
    assert report.stored_bytes == (3 + 128 + 4) * 4
    assert 1 + 16 + 1 <= report.stored_sectors <= 2 + 17 + 2
    assert report.sectors == report.loaded_sectors + report.stored_sectors


# --- one mistake of every kind ----------------------------------------------------------------------


def wrong_schedules(probe: HostKernels, fault: str) -> int:
    """In how many of 20 random schedules the results are wrong."""
    wrong = 0
    for seed in range(20):
        outputs, _ = case(fault).run(probe, Execution(seed=seed))
        try:
            for name, want in case().expected.items():
                assert_close(outputs[name], want, name)
        except AssertionError:
            wrong += 1
    return wrong


@pytest.mark.parametrize("fault", ["missing barrier", "missing reuse barrier", "missing copy wait"])
def test_race_gives_wrong_results_under_some_schedule(probe: HostKernels, fault: str) -> None:
    assert wrong_schedules(probe, fault) >= 5


@pytest.mark.parametrize("fault", ["fragment", "unwritten"])
def test_mistake_gives_wrong_results_under_every_schedule(probe: HostKernels, fault: str) -> None:
    assert wrong_schedules(probe, fault) == 20


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("divergent barrier", "divergent barrier"),
        ("deadlock", "32 threads wait in bar.sync"),
        ("shuffle mask", "outside the mask"),
    ],
)
def test_undefined_use_is_reported_with_its_line(probe: HostKernels, fault: str, message: str) -> None:
    with pytest.raises(KernelError, match=rf"{message}.* at .*kernel\.cu:\d+"):
        case(fault).run(probe)
    case().check(probe)  # and the runtime goes on


@pytest.mark.parametrize("fault", ["shared total", "shared most"])
def test_shared_memory_that_a_launch_does_not_get_is_reported(probe: HostKernels, fault: str) -> None:
    with pytest.raises(KernelError, match="more shared memory, static and dynamic together"):
        case(fault).run(probe)
    case().check(probe)


def test_blocks_that_write_the_same_byte_are_reported(probe: HostKernels) -> None:
    with pytest.raises(KernelError, match="two blocks of a launch touch one byte"):
        case("block conflict").run(probe, Execution(watch="conflicts"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("bound", "heap-buffer-overflow"),
        ("shared bound", "index 4 out of bounds|global-buffer-overflow"),
        ("misaligned", "misaligned address"),
    ],
)
def test_address_sanitizer_reports(fault: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        case(fault).run(load("address"))


def test_address_sanitizer_is_content_without_a_mistake() -> None:
    case().check(load("address"))


@pytest.mark.parametrize("fault", ["missing atomic", "missing barrier"])
def test_thread_sanitizer_reports(fault: str) -> None:
    with pytest.raises(KernelError, match="data race"):
        case(fault).run(load("thread"))


def test_thread_sanitizer_is_content_without_a_mistake() -> None:
    case().check(load("thread"))


# --- building and parameters ------------------------------------------------------------------------


def test_params_are_read_from_the_header(probe: HostKernels) -> None:
    fields = {f.name: f for f in read_params("probe", HARNESS).fields}
    assert (fields["x"].shape, fields["x"].format) == (("rows", "columns"), "float32")
    assert fields["rows"].kind == "size"
    assert fields["fault"].kind == "attribute"


def test_unknown_parameter_is_refused(probe: HostKernels) -> None:
    wrong = case()
    wrong.values["colums"] = 3
    with pytest.raises(PluginError, match="no parameter colums"):
        wrong.run(probe)


def test_array_that_is_not_contiguous_is_refused(probe: HostKernels) -> None:
    wrong = case()
    wrong.values["x"] = wrong.values["x"].T.contiguous().T
    with pytest.raises(PluginError, match="not contiguous"):
        probe.launch("probe", wrong.values)


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    host_build.compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PluginError, match="Install it"):
        host_build.compiler()
    monkeypatch.undo()
    host_build.compiler.cache_clear()


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_a_compiler_that_says_no_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    program = tmp_path / "compiler"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    host_build.compiler.cache_clear()
    monkeypatch.setenv("CXX", str(program))
    with pytest.raises(PluginError, match="no usable compiler"):
        host_build.compiler()
    monkeypatch.undo()
    host_build.compiler.cache_clear()


def test_compiler_messages_are_shown(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("int f( {")
    with pytest.raises(PluginError, match=r"g\+\+ failed[\s\S]*broken.cu:1"):
        host_build.build("plain", [tmp_path / "broken.cu"])
