"""scripts/check_kernels: what it reads in the compiler's report and in machine code, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext.export.errors import PluginError
from flashnext.plugins import cuda_tools, device_check
from flashnext.plugins.cuda_tools import find_tool
from flashnext.plugins.device_check import Kernel, check, parse_resources
from flashnext.plugins.machine_code import read_listing

HARNESS = Path(__file__).parent / "harness/machine_code/kernel.cu"
LISTING = """
	code for sm_90
		Function : first
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.STRONG.GPU R4, [R2.64] ;
        /*0040*/              @UP0 STG.E.64 desc[UR4][R2.64], R4 ;
        /*0050*/                   LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR6][R2.64] ;
		Function : second
        /*0000*/                   STL.64 [R1], R2 ;
        /*0010*/                   LD.E R0, [R2.64] ;
"""


@pytest.fixture(scope="module")
def tools() -> None:
    """nvcc is no dependency of the tests; cuobjdump comes with the extra `dev` on Linux."""
    try:
        find_tool("nvcc"), find_tool("cuobjdump")
    except PluginError as error:
        pytest.skip(str(error))


def test_widths_are_read_from_the_mnemonics() -> None:
    found = read_listing(LISTING)
    assert found["first"] == {"load": {128: 1, 16: 1, 32: 1}, "store": {64: 1}, "copy": {128: 1}}
    assert found["second"] == {"local": {64: 1}, "generic": {32: 1}}


def test_local_accesses_are_a_fault() -> None:
    assert Kernel("op", "k", "90", accesses={"local": {64: 1, 32: 2}}).faults == ["3 local accesses"]
    assert Kernel("op", "k", "90", accesses={"load": {64: 1}}).faults == []


def test_report_in_an_unknown_form_is_an_error() -> None:
    with pytest.raises(PluginError, match="does not know"):
        list(parse_resources("Compiling entry function 'f' for 'sm_90'\nall is well", "op"))


def test_compiler_and_machine_code_agree_with_the_source(tools: None) -> None:
    kernels = {kernel.name: kernel for kernel in check(HARNESS, "90")}
    clean = kernels["known_widths"]
    assert clean.faults == []
    assert clean.shared_bytes == 32 * 16
    assert clean.accesses["load"] == {128: 1, 64: 1, 32: 1, 16: 1, 8: 1}
    assert clean.accesses["store"] == {128: 1, 32: 1}
    assert clean.accesses["copy"] == {128: 1}
    assert [fault.split(" ", 1)[1] for fault in kernels["local_array"].faults] == ["bytes of stack", "local accesses"]
    assert "spilled bytes" in kernels["spilled"].faults[0]


def test_candidates_pass(tools: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["--op", "candidates", "--target", "90", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faulty"] == 0
    assert all(kernel["registers"] and kernel["accesses"]["load"] for kernel in found["kernels"])


def test_a_fault_fails(tools: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_check, "kernel_sources", lambda: [HARNESS])
    assert device_check.main(["--target", "120"]) == 1
    assert "local accesses" in capsys.readouterr().out


@pytest.mark.slow
def test_all_kernels_pass_for_all_targets(tools: None) -> None:
    assert device_check.main([]) == 0


# --- finding the tools ------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without CUDA; returns an empty folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_tools, "toolkits", lambda: [tmp_path])
    return tmp_path


@pytest.mark.parametrize("name", sorted(cuda_tools.PACKAGES))
def test_missing_tool_is_named_with_its_packages(nowhere: Path, name: str) -> None:
    with pytest.raises(PluginError, match=f"{name} .* not here.* pip install {cuda_tools.PACKAGES[name]}"):
        find_tool(name)
    assert cuda_tools.main([name]) == 2


def test_check_without_tools_ends_with_a_sentence(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main([]) == 2
    assert "pip install nvidia-cuda-nvcc" in capsys.readouterr().err


def test_tool_is_found_in_a_wheel(nowhere: Path) -> None:
    (nowhere / "bin").mkdir()
    tool = nowhere / "bin/nvcc"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_tool("nvcc") == tool


def test_wheels_of_this_environment_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "nvidia/cu13").mkdir(parents=True)
    code = "from flashnext.plugins.cuda_tools import wheels; print(*wheels(), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert str(tmp_path / "nvidia/cu13") in run.stdout.splitlines()
