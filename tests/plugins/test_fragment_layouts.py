"""Fragment layouts of the host execution's mma and ldmatrix against a description that is not ours: CuTe's.

CuTe's headers (PyPI's nvidia-cutlass, of which nothing else is needed) compile under g++ with CUDA's. A product of
fragments that are filled by its layouts has to be the matrices' product.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch
from kernel_checks import poisoned
from torch import Tensor

from flashnext.plugins.cuda_tools import toolkits
from flashnext.plugins.host_build import compiler
from flashnext.plugins.host_library import HostKernels

HARNESS = Path(__file__).parent / "harness"
FLAGS = ("-std=c++17", "-O0", "-w")
LANES, BITS = 32, 16
Layouts = dict[str, Tensor]


@pytest.fixture(scope="module")
def cute(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    """Each layout as [32 lanes, values]."""
    spec = importlib.util.find_spec("cutlass_library")
    if not spec or not spec.submodule_search_locations:
        pytest.skip("CuTe is not here: pip install --no-deps nvidia-cutlass")
    headers = [place / "include" for place in toolkits() if (place / "include/cuda_runtime.h").exists()]
    if not headers:
        pytest.skip("CUDA's headers are not here: pip install nvidia-cuda-runtime nvidia-cuda-cccl")
    program = tmp_path_factory.mktemp("cute") / "layouts"
    include = [Path(spec.submodule_search_locations[0]) / "source/include", headers[0], headers[0] / "cccl"]
    source = HARNESS / "fragments/cute_layouts.cpp"
    command = [compiler()[0], *FLAGS, *(f"-I{folder}" for folder in include), str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: torch.tensor([*map(int, places)]).view(LANES, -1) for name, *places in map(str.split, lines)}


def run(a: Tensor, b: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """One warp over these fragments."""
    kernels = HostKernels.load("plain", [HARNESS / "fragments/kernel.cu"], HARNESS)
    loads = {name: poisoned(LANES, 8, dtype=torch.bfloat16) for name in ("loaded", "transposed")}
    values = {"a": a, "b": b, "rows": rows, "product": poisoned(LANES, 4), **loads}
    kernels.launch("fragments", values)
    return values


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def product(cute: Layouts, a: Tensor, b: Tensor) -> Tensor:
    """a [16, 16] times b [8, 16], by fragments in CuTe's layouts, which count down the columns."""
    out = run(a.T.flatten()[cute["a"]], b.T.flatten()[cute["b"]], random(LANES, 8))["product"]
    found = torch.full((8 * 16,), torch.nan)
    found[cute["c"]] = out
    return found.view(8, 16).T


def test_mma(cute: Layouts) -> None:
    a, b = random(16, 16), random(8, 16)
    torch.testing.assert_close(product(cute, a, b), a.float() @ b.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operand", ["a", "b", "c"])
def test_another_layout_would_show(cute: Layouts, operand: str) -> None:
    a, b = random(16, 16), random(8, 16)
    wrong = {**cute, operand: cute[operand].roll(1, 1)}
    assert (product(wrong, a, b) - a.float() @ b.float().T).abs().max() > 0.1


@pytest.mark.parametrize(("name", "output"), [("load", "loaded"), ("transposed", "transposed")])
def test_ldmatrix(cute: Layouts, name: str, output: str) -> None:
    """Every 16-bit value of the target is the one of the source that has the same place."""
    rows = random(LANES, 8)
    source, target = cute[f"{name}_source"][:, ::BITS], cute[f"{name}_target"][:, ::BITS]
    values = dict(zip(source.flatten().tolist(), rows.flatten().tolist(), strict=True))
    want = torch.tensor([values[place] for place in target.flatten().tolist()]).view(LANES, 8).bfloat16()
    got = run(random(LANES, 8), random(LANES, 4), rows)[output]
    assert torch.equal(got, want)
