"""Tiles and tensor core products (plugins/common/tensor_tile.h), by plain products at ragged sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, Case, assert_deterministic, normal, poisoned

from flashnext.plugins.host_library import HostKernels

HARNESS = Path(__file__).parent / "harness"
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def gemm() -> HostKernels:
    return load("plain")


def load(kind: str) -> HostKernels:
    return HostKernels.load(kind, [HARNESS / "gemm/kernel.cu"], HARNESS)


def gemm_case(m: int, n: int, k: int, gathered: int, seed: int = 0) -> Case:
    """Sizes need no relation to the tiles; m, n and k are multiples of 8."""
    g = torch.Generator().manual_seed(seed)
    a, b = normal(g, m, k, dtype=BF16), normal(g, n, k, dtype=BF16)
    rows = torch.randint(-1, m, (gathered,), generator=g, dtype=torch.int32)
    picked = a.float()[rows.clamp_min(0)] * (rows >= 0)[:, None]
    corner = torch.zeros(16, 16)
    corner[: min(m, 16), : min(k, 16)] = a[:16, :16].float()
    product = a.float() @ b.float().T
    expected = {
        "product": product,
        "transposed": product,
        "picked": picked @ b.float().T,
        "chained": (corner.double() @ corner.T.double()).to(BF16).float() @ corner,
    }
    values = {"a": a, "b": b, "a_columns": a.T.contiguous(), "b_columns": b.T.contiguous(), "rows": rows}
    values["places"] = poisoned(4, 8, dtype=torch.int32)
    return Case("gemm", values | {name: poisoned(*want.shape) for name, want in expected.items()}, expected)


@EXAMPLES
@given(
    m=st.sampled_from([8, 16, 64, 72, 136]),
    n=st.sampled_from([8, 56, 64, 128, 136]),
    k=st.sampled_from([8, 16, 24, 32, 40, 64, 200]),
    gathered=st.sampled_from([1, 15, 63, 64, 65, 130]),
    seed=st.integers(0, 100),
)
def test_products(gemm: HostKernels, m: int, n: int, k: int, gathered: int, seed: int) -> None:
    gemm_case(m, n, k, gathered, seed).check(gemm)


def test_eight_rows_reach_all_banks(gemm: HostKernels) -> None:
    case = gemm_case(8, 8, 8, 1)
    case.expected["places"] = case.values["places"]
    outputs, _ = case.run(gemm)
    for places in outputs["places"].tolist():
        assert sorted(places) == list(range(8))


def test_same_bits_under_every_schedule(gemm: HostKernels) -> None:
    assert_deterministic(gemm_case(72, 72, 72, 65), gemm)


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_sanitizer_is_content(kind: str) -> None:
    gemm_case(24, 72, 40, 17).check(load(kind))
