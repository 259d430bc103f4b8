"""The candidate selection against a stable sort: the same values, the same indices; the sum over the row."""

from __future__ import annotations

import math

import pytest
import torch
from candidates_case import candidates_case
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, Case, assert_deterministic, assert_same_bits

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels
from flashnext.runtime.logits import SUM_ERROR

F32, BF16 = torch.float32, torch.bfloat16


def check(case: Case, kernels: HostKernels) -> None:
    outputs, _ = case.run(kernels)
    for name in ("values", "indices"):
        assert torch.equal(outputs[name], case.expected[name]), name
    torch.testing.assert_close(outputs["sums"], case.expected["sums"], rtol=SUM_ERROR, atol=0.0)


@EXAMPLES
@given(
    rows=st.integers(1, 3),
    vocabulary=st.sampled_from([1, 7, 511, 512, 513, 8192, 8193, 8200, 17000]),
    count=st.sampled_from([1, 2, 31, 256, 512]),
    dtype=st.sampled_from([F32, BF16]),
    logits=st.sampled_from(["free", "tied", "equal"]),
    seed=st.integers(0, 100),
)
def test_random_shapes(
    kernels: HostKernels, rows: int, vocabulary: int, count: int, dtype: torch.dtype, logits: str, seed: int
) -> None:
    sizes = {"rows": rows, "vocabulary": vocabulary, "count": min(count, vocabulary)}
    check(candidates_case(**sizes, dtype=dtype, logits=logits, seed=seed), kernels)


@pytest.mark.parametrize("count", [1, 256])
@pytest.mark.parametrize("logits", ["free", "tied"])
def test_official_vocabulary(kernels: HostKernels, logits: str, count: int) -> None:
    check(candidates_case(rows=1, vocabulary=248320, count=count, dtype=BF16, logits=logits), kernels)


def test_logits_of_minus_infinity_come_last(kernels: HostKernels) -> None:
    check(candidates_case(rows=1, vocabulary=9000, count=512, logits="infinite"), kernels)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_sums_of_flat_and_of_peaked_rows(kernels: HostKernels, scale: float, temperature: float) -> None:
    check(candidates_case(rows=1, vocabulary=248320, count=8, scale=scale, temperature=temperature), kernels)


@pytest.mark.parametrize("wrong", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [0.0, -math.inf])
def test_the_sum_tells_of_logits_that_are_no_numbers(kernels: HostKernels, wrong: float, others: float) -> None:
    """Also where the candidates do not: a NaN with its sign set is the smallest of them."""
    case = candidates_case(rows=1, vocabulary=9000, count=4)
    case.values["logits"].fill_(others)
    case.values["logits"][0, 8500] = wrong
    outputs, _ = case.run(kernels)
    assert outputs["sums"].isnan().item() == (wrong != -math.inf or others == -math.inf)


def test_temperatures_that_are_none_are_refused(kernels: HostKernels) -> None:
    for wrong in (0.0, -1.0, math.nan):
        case = candidates_case(rows=1, vocabulary=8, count=4)
        case.values["inverse_temperature"] = wrong
        with pytest.raises(PluginError, match="inverse_temperature must be above 0"):
            case.run(kernels)


def test_same_bits_under_every_schedule(kernels: HostKernels) -> None:
    assert_deterministic(candidates_case(rows=2, vocabulary=9000, count=20, logits="tied"), kernels)


def test_a_row_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = candidates_case(rows=3, vocabulary=9000, count=40, dtype=BF16, logits="tied")
    together, _ = case.run(kernels)
    case.values |= {name: case.values[name][2:] for name in ("logits", "values", "indices", "sums")}
    alone, _ = case.run(kernels)
    assert_same_bits(alone, {name: t[2:].contiguous() for name, t in together.items()})


def test_more_candidates_of_the_parts_than_shared_memory_holds(kernels: HostKernels) -> None:
    check(candidates_case(rows=1, vocabulary=33 * 8192, count=512, dtype=BF16, logits="tied"), kernels)


def test_candidates_of_the_parts_that_just_fit_beside_the_static_arrays(kernels: HostKernels) -> None:
    """48 KB of them, which a launch has to ask for, since the kernel has 5 KB more."""
    check(candidates_case(rows=1, vocabulary=24 * 8192, count=512, dtype=BF16), kernels)


def test_official_vocabulary_moves_every_byte_once(kernels: HostKernels) -> None:
    case = candidates_case(rows=1, vocabulary=248320, count=256, dtype=BF16)
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(v.nbytes for v in case.values.values() if isinstance(v, torch.Tensor)) / 32
    assert report.launches == 2
    assert report.sectors <= 1.10 * needed


def test_more_candidates_than_the_vocabulary_are_refused(kernels: HostKernels) -> None:
    case = candidates_case(rows=1, vocabulary=4, count=4)
    case.values["values"], case.values["indices"] = torch.zeros(1, 5), torch.zeros(1, 5, dtype=torch.int32)
    with pytest.raises(PluginError, match="at most the vocabulary"):
        case.run(kernels)
