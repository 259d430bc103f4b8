"""NgramInjection's kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, Case, assert_deterministic, assert_same_bits
from ngram_injection_case import OFFICIAL, SMALL, Row, ngram_injection_case

from flashnext.export.errors import PluginError
from flashnext.plugins.host_library import Execution, HostKernels

F32, BF16 = torch.float32, torch.bfloat16
FORMS = ("embed", "pending")
PER_TOKEN = ("r", "y", "s", "key", "value")
PASTS = (0, 1, 2, 3, 8, 9, 10, 100)


@EXAMPLES
@given(
    form=st.sampled_from(FORMS),
    data=st.data(),
    steps=st.sampled_from([1, 2, 4, 5, 8, 9, 13, 30]),
    branches=st.integers(1, 4),
    hidden=st.sampled_from([8, 40, 264]),
    width=st.integers(1, 4),
    dilation=st.integers(1, 3),
    window=st.sampled_from([4, 8]),
    dtype=st.sampled_from([F32, BF16]),
    seed=st.integers(0, 100),
)
def test_random_steps(
    kernels: HostKernels,
    form: str,
    data: st.DataObject,
    steps: int,
    branches: int,
    hidden: int,
    width: int,
    dilation: int,
    window: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    row = st.builds(Row, st.sampled_from(PASTS), st.sampled_from([0, 1, steps // 2, steps]))
    rows = data.draw(st.lists(row, min_size=1, max_size=3))
    sizes = {"branches": branches, "hidden": hidden, "width": width, "dilation": dilation, "window": window}
    ngram_injection_case(form, rows, steps, **sizes, dtype=dtype, seed=seed).check(kernels)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [1, 4, 5, 14])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_start_of_a_sequence(kernels: HostKernels, form: str, steps: int, dtype: torch.dtype) -> None:
    rows = [Row(past, steps) for past in PASTS]
    ngram_injection_case(form, rows, steps, **SMALL, dtype=dtype).check(kernels)


@pytest.mark.parametrize("form", FORMS)
def test_official_sizes(kernels: HostKernels, form: str) -> None:
    ngram_injection_case(form, [Row(20, 2)], 2, **OFFICIAL, dtype=BF16).check(kernels)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", ["static", "dynamic"])
def test_fp8_state(kernels: HostKernels, form: str, state: str) -> None:
    """Sums run in another order than the reference's, so a code may be its neighbour where the value lies between."""
    case = ngram_injection_case(form, [Row(20, 2), Row(0, 1)], 2, **SMALL, state=state)
    outputs, _ = case.run(kernels)
    codes, wanted = (t["r_out"].view(torch.uint8).int() for t in (outputs, case.expected))
    assert ((codes - wanted).abs() <= 1).all()
    assert (codes != wanted).float().mean() < 0.01
    if state == "dynamic":
        torch.testing.assert_close(outputs["r_out_token_scale"], case.expected["r_out_token_scale"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", ["static", "dynamic"])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_codes_of_equal_values(
    kernels: HostKernels, form: str, state: str, stochastic: bool, dtype: torch.dtype
) -> None:
    """With nothing to inject no sum's order matters, and codes and scales are the reference's bit for bit."""
    rows = [Row(20, 3), Row(0, 2), Row(0, 0)]
    sizes = SMALL | {"hidden": 264}
    ngram_injection_case(form, rows, 3, **sizes, dtype=dtype, state=state, stochastic=stochastic, quiet=True).check(
        kernels
    )


@pytest.mark.parametrize("steps", [3, 14])
def test_same_bits_under_every_schedule(kernels: HostKernels, steps: int) -> None:
    rows = [Row(20, steps), Row(0, 2), Row(0, 0)]
    assert_deterministic(ngram_injection_case("pending", rows, steps, **SMALL), kernels)


def test_a_sequence_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = ngram_injection_case("pending", [Row(20, 2), Row(0, 1), Row(9, 2)], 2, **SMALL, dtype=BF16)
    together, _ = case.run(kernels)
    per_row = (*PER_TOKEN, "slots", "past_len", "new_len", "r_out")
    case.values |= {name: case.values[name][2:].contiguous() for name in per_row}
    alone, _ = case.run(kernels)
    assert_same_bits({"r_out": alone["r_out"]}, {"r_out": together["r_out"][2:].contiguous()})


def test_short_and_long_steps_give_the_same_bits(kernels: HostKernels) -> None:
    """One launch or two: a step padded to nine tokens, and the same tokens in one of eight."""
    rows = [Row(20, 8), Row(0, 5), Row(2, 8)]
    case = ngram_injection_case("pending", rows, 9, **SMALL, window=9, dtype=BF16)
    counting = Execution(watch="sectors")
    long, report = case.run(kernels, counting)
    assert report.launches == 2
    values = {name: v[:, :8].contiguous() for name, v in case.values.items() if name in (*PER_TOKEN, "r_out")}
    short, report = Case(case.op, case.values | values, case.expected).run(kernels, counting)
    assert report.launches == 1
    assert_same_bits(
        {"r_out": short["r_out"], "conv_state": short["conv_state"]},
        {"r_out": long["r_out"][:, :8].contiguous(), "conv_state": long["conv_state"]},
    )


def test_official_sizes_move_every_byte_once(kernels: HostKernels) -> None:
    case = ngram_injection_case("pending", [Row(20, 1)], 1, **OFFICIAL, dtype=BF16)
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(v.nbytes for n, v in case.values.items() if isinstance(v, torch.Tensor) and n != "conv_state")
    needed += 4 * case.values["conv_state"][0, 0].nbytes
    assert report.launches == 1
    assert report.sectors <= 1.10 * needed / 32


def test_sizes_without_a_kernel_are_refused(kernels: HostKernels) -> None:
    with pytest.raises(PluginError, match="multiple of 8"):
        ngram_injection_case("embed", [Row(0, 1)], 1, **(SMALL | {"hidden": 12})).run(kernels)
