"""One small case of every op under AddressSanitizer with UBSan, and under ThreadSanitizer.

The whole suite runs in either build with FLASHNEXT_HOST_KERNELS=address (or thread) pytest tests/plugins.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from candidates_case import candidates_case
from gated_delta_net_case import SMALL, Row, gated_delta_net_case
from gated_residual_case import gated_residual_case
from kernel_checks import Case
from ngram_injection_case import Row as NgramRow
from ngram_injection_case import ngram_injection_case
from ngram_rows_case import ngram_rows_case
from sparse_attention_case import SMALL as ATTENTION
from sparse_attention_case import Row as AttentionRow
from sparse_attention_case import sparse_attention_case
from sparse_moe_case import sparse_moe_case

from flashnext.plugins.host_build import kernel_sources
from flashnext.plugins.host_library import HostKernels

BF16 = torch.bfloat16
NGRAM = {"branches": 2, "hidden": 24, "width": 4, "dilation": 3}
CASES: dict[str, Callable[[], Case]] = {
    "candidates": lambda: candidates_case(rows=2, vocabulary=5000, count=9, dtype=BF16),
    "gated_delta_net": lambda: gated_delta_net_case([Row(20, 3, 2), Row(2, 2, 1)], 2, **SMALL, dtype=BF16),
    "gated_delta_net, long step": lambda: gated_delta_net_case(
        [Row(20, 3, 66), Row(2, 2, 5)], 66, **SMALL | {"key_heads": 1, "value_heads": 2}, dtype=BF16
    ),
    "gated_residual": lambda: gated_residual_case("pending", tokens=2, branches=3, hidden=40, rank=24, dtype=BF16),
    "gated_residual, long": lambda: gated_residual_case(
        "pending", tokens=66, branches=3, hidden=40, rank=24, dtype=BF16, state="dynamic", fp8_weights=True
    ),
    "ngram_injection": lambda: ngram_injection_case(
        "pending", [NgramRow(7, 2), NgramRow(0, 1)], 2, **NGRAM, dtype=BF16
    ),
    "ngram_rows": lambda: ngram_rows_case(batch=2, steps=3, per_order=2, columns=16, table=BF16, out=BF16),
    "sparse_attention": lambda: sparse_attention_case(
        "select", [AttentionRow(22, 2), AttentionRow(0, 1)], 2, **ATTENTION
    ),
    "sparse_attention, tiles": lambda: sparse_attention_case(
        "select", [AttentionRow(82, 9), AttentionRow(0, 10)], 10, **{**ATTENTION, "budget_blocks": 18}, dtype=BF16
    ),
    "sparse_attention, tiles, FP8 cache": lambda: sparse_attention_case(
        "given", [AttentionRow(82, 9), AttentionRow(0, 10)], 10, fp8_scales=(0.1, 0.1), **ATTENTION, dtype=BF16
    ),
    "sparse_moe": lambda: sparse_moe_case("nvfp4", tokens=2, hidden=64, inner=32, experts=9, top_k=3, dtype=BF16),
    "sparse_moe, long step": lambda: sparse_moe_case(
        "fp8", tokens=20, hidden=64, inner=32, experts=5, top_k=2, dtype=BF16
    ),
}


def test_every_op_has_a_case() -> None:
    assert sorted({name.split(",")[0] for name in CASES}) == [source.parent.name for source in kernel_sources()]


@pytest.mark.parametrize("op", CASES)
def test_small_case(kernels: HostKernels, op: str) -> None:
    """In the build that the suite runs on: on a GPU under compute-sanitizer."""
    CASES[op]().check(kernels)


@pytest.mark.parametrize("kind", ["address", "thread"])
@pytest.mark.parametrize("name", CASES)
def test_sanitizer_is_content(name: str, kind: str) -> None:
    CASES[name]().check(HostKernels.load(kind))
