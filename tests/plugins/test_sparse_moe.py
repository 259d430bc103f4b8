"""SparseMoE's kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits
from sparse_moe_case import OFFICIAL, sparse_moe_case

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16
WEIGHTS = ("plain", "fp8", "nvfp4")
SMALL = {"hidden": 64, "inner": 32, "experts": 16, "top_k": 3}


@pytest.mark.parametrize("weights", WEIGHTS)
@EXAMPLES
@given(
    dtype=st.sampled_from([F32, BF16]),
    tokens=st.integers(1, 5),
    hidden=st.sampled_from([32, 96, 256, 320]),
    inner=st.sampled_from([32, 64, 160]),
    experts=st.sampled_from([3, 31, 33, 40]),
    top_k=st.integers(1, 3),
    normalize=st.integers(0, 1),
    logits=st.sampled_from(["free", "tied", "equal", "extreme"]),
    seed=st.integers(0, 100),
)
def test_random_shapes(
    kernels: HostKernels,
    weights: str,
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    normalize: int,
    logits: str,
    seed: int,
) -> None:
    sizes = {"tokens": tokens, "hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k}
    sparse_moe_case(weights, **sizes, normalize=normalize, dtype=dtype, logits=logits, seed=seed).check(kernels)


@pytest.mark.parametrize("top_k", [1, 10, 16])
@pytest.mark.parametrize("logits", ["free", "tied", "equal"])
def test_as_many_experts_as_official(kernels: HostKernels, logits: str, top_k: int) -> None:
    sparse_moe_case("plain", tokens=2, hidden=16, inner=8, experts=512, top_k=top_k, logits=logits).check(kernels)


def test_experts_whose_vectors_fill_shared_memory(kernels: HostKernels) -> None:
    """Those of 8 experts 1,536 wide take 48 KB, and the kernel has static arrays beside them."""
    sparse_moe_case("plain", tokens=1, hidden=16, inner=1536, experts=8, top_k=8, dtype=BF16).check(kernels)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_same_bits_under_every_schedule(kernels: HostKernels, weights: str) -> None:
    assert_deterministic(sparse_moe_case(weights, tokens=2, **SMALL, dtype=BF16), kernels)


def test_a_token_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = sparse_moe_case("plain", tokens=4, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    case.values |= {name: case.values[name][3:] for name in ("x", "router_logits", "y")}
    alone, _ = case.run(kernels)
    assert_same_bits(alone, {"y": together["y"][3:].contiguous()})


@pytest.mark.parametrize("weights", WEIGHTS)
def test_official_sizes_move_every_byte_once(kernels: HostKernels, weights: str) -> None:
    """As many experts as a token takes."""
    case = sparse_moe_case(weights, tokens=1, experts=10, **OFFICIAL, dtype=BF16)
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(v.nbytes for v in case.values.values() if isinstance(v, torch.Tensor)) / 32
    assert report.launches == 2
    assert report.sectors <= 1.10 * needed


@pytest.mark.parametrize(
    ("change", "message"),
    [({"experts": 513}, "at most 512"), ({"top_k": 17}, "1 to 16"), ({"hidden": 12}, "multiple of 8")],
)
def test_sizes_without_a_kernel_are_refused(kernels: HostKernels, change: dict[str, int], message: str) -> None:
    sizes = {"tokens": 1, "hidden": 8, "inner": 8, "experts": 20, "top_k": 2} | change
    with pytest.raises(PluginError, match=message):
        sparse_moe_case("plain", **sizes).run(kernels)
