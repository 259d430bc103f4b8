"""GatedResidual's kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from gated_residual_case import OFFICIAL, SEED, SITE, gated_residual_case
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import EXAMPLES, assert_deterministic, assert_same_bits

from flashnext.export.errors import PluginError
from flashnext.export.ops.reference.residual_store import StochasticRounding, dynamic_scale, quantize
from flashnext.plugins.host_library import Execution, HostKernels

FORMS = ("embed", "pending", "settled", "last")
F32, BF16 = torch.float32, torch.bfloat16
FORMATS = {
    "float": {"dtype": F32},
    "bf16": {"dtype": BF16},
    "float, static FP8 state": {"dtype": F32, "state": "static"},
    "float, dynamic FP8 state": {"dtype": F32, "state": "dynamic"},
    "bf16, static FP8 state": {"dtype": BF16, "state": "static"},
    "bf16, dynamic FP8 state, FP8 weights": {"dtype": BF16, "state": "dynamic", "fp8_weights": True},
    "bf16, FP8 weights": {"dtype": BF16, "fp8_weights": True},
    "float, static FP8 state, stochastic": {"dtype": F32, "state": "static", "stochastic": True},
    "bf16, dynamic FP8 state, stochastic": {"dtype": BF16, "state": "dynamic", "stochastic": True},
}


@pytest.mark.parametrize("formats", FORMATS)
@EXAMPLES
@given(
    form=st.sampled_from(FORMS),
    tokens=st.sampled_from([1, 2, 7, 8, 9, 17]),
    branches=st.integers(1, 4),
    hidden=st.sampled_from([8, 24, 256, 264]),
    rank=st.sampled_from([8, 16, 40, 72]),
    seed=st.integers(0, 100),
)
def test_random_shapes(
    kernels: HostKernels, formats: str, form: str, tokens: int, branches: int, hidden: int, rank: int, seed: int
) -> None:
    sizes = {"tokens": tokens, "branches": branches, "hidden": hidden, "rank": rank}
    gated_residual_case(form, **sizes, **FORMATS[formats], seed=seed).check(kernels)  # type: ignore[arg-type]


# Sizes around the edges of what prefill.h works on at a time: 64 tokens, 32 columns of W_down, 64 rows and 32 of W_up.
@pytest.mark.parametrize("formats", [name for name in FORMATS if name.startswith("bf16")])
@EXAMPLES
@given(
    form=st.sampled_from([*FORMS, "start"]),
    tokens=st.sampled_from([33, 63, 64, 65, 127, 128, 129]),
    branches=st.integers(1, 4),
    hidden=st.sampled_from([8, 32, 56, 64, 72, 136]),
    rank=st.sampled_from([8, 24, 32, 40, 64, 120, 128, 136]),
    seed=st.integers(0, 100),
)
def test_long_steps(
    kernels: HostKernels, formats: str, form: str, tokens: int, branches: int, hidden: int, rank: int, seed: int
) -> None:
    sizes = {"tokens": tokens, "branches": branches, "hidden": hidden, "rank": rank}
    gated_residual_case(form, **sizes, **FORMATS[formats], seed=seed).check(kernels)  # type: ignore[arg-type]


def test_more_tokens_than_a_round(kernels: HostKernels) -> None:
    gated_residual_case("pending", tokens=2048 + 65, branches=2, hidden=8, rank=8, dtype=BF16).check(kernels)


def test_many_tokens_are_cut_otherwise(kernels: HostKernels) -> None:
    """With 17 tiles of tokens a block has more rows of W_down, and more columns."""
    sizes = {"tokens": 17 * 64 - 1, "branches": 4, "hidden": 136, "rank": 40}
    gated_residual_case("pending", **sizes, dtype=BF16, state="dynamic", stochastic=True).check(kernels)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_form(kernels: HostKernels, form: str, dtype: torch.dtype) -> None:
    gated_residual_case(form, tokens=3, branches=4, hidden=64, rank=16, dtype=dtype).check(kernels)


@pytest.mark.parametrize("formats", [name for name in FORMATS if "FP8 state" in name])
def test_the_start_of_a_draft_layer(kernels: HostKernels, formats: str) -> None:
    sizes = {"tokens": 3, "branches": 4, "hidden": 64, "rank": 16}
    gated_residual_case("start", **sizes, **FORMATS[formats]).check(kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("state", ["static", "dynamic"])
def test_extreme_states(kernels: HostKernels, state: str, stochastic: bool) -> None:
    """Codes and scales where values saturate, vanish, or are no numbers."""
    size = {"tokens": 8, "branches": 2, "hidden": 64, "rank": 8}
    case = gated_residual_case("start", **size, state=state, stochastic=stochastic)  # type: ignore[arg-type]
    start = case.values["start"]
    start[1:] *= torch.tensor([1e38, 1e3, 1e-2, 1e-4, 1e-37, 1e-44, 0.0])[:, None, None]
    start[2, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    scale = case.values["r_out_scale"] if state == "static" else dynamic_scale(start)
    outputs, _ = case.run(kernels)
    rounding = StochasticRounding(case.values["positions"], SITE, SEED) if stochastic else None
    wanted = quantize(start, scale, rounding=rounding)
    stored, is_nan = outputs["r_out"].float(), start.isnan()
    assert torch.equal(stored.isnan(), is_nan)
    assert torch.equal(outputs["r_out"].view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan])
    if state == "dynamic":
        assert_same_bits({"scale": outputs["r_out_token_scale"]}, {"scale": scale})


def test_columns_of_a_branch_split_over_blocks(kernels: HostKernels) -> None:
    gated_residual_case("pending", tokens=2, branches=2, hidden=8 * 512 + 16, rank=8, state="dynamic").check(kernels)


@pytest.mark.parametrize("formats", ["bf16", "bf16, dynamic FP8 state, FP8 weights"])
def test_official_sizes(kernels: HostKernels, formats: str) -> None:
    gated_residual_case("pending", tokens=2, **OFFICIAL, **FORMATS[formats]).check(kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize("formats", ["bf16", "bf16, dynamic FP8 state, FP8 weights"])
def test_long_steps_at_official_sizes(kernels: HostKernels, formats: str) -> None:
    case = gated_residual_case("pending", tokens=37, **OFFICIAL, **FORMATS[formats])  # type: ignore[arg-type]
    if kernels.kind != "plain":
        case.check(kernels)
        return
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(v.nbytes for v in case.values.values() if isinstance(v, torch.Tensor))
    assert report.launches == 2
    assert report.sectors <= 1.10 * needed / 32
    # Weights once, and what a token adds, caches included. With the kernels for decoding it would be 8 MB a token.
    assert report.loaded_bytes <= needed + 37 * 0.5e6


def test_a_state_of_zeros_in_dynamic_fp8(kernels: HostKernels) -> None:
    case = gated_residual_case("embed", tokens=2, branches=2, hidden=16, rank=8, state="dynamic")
    case.values["embedding"].zero_()
    outputs, _ = case.run(kernels)
    assert all(outputs[name].float().isfinite().all() for name in outputs)
    assert (outputs["r_out"].float() == 0).all()


@pytest.mark.parametrize("tokens", [3, 70])
def test_state_may_be_written_in_place(kernels: HostKernels, tokens: int) -> None:
    case = gated_residual_case("pending", tokens=tokens, branches=4, hidden=136, rank=16, dtype=BF16)
    apart, _ = case.run(kernels)
    values = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in case.values.items()}
    values["r_out"] = values["r"]
    if kernels.kind != "plain":
        pytest.skip("a replayed launch has every buffer apart")
    kernels.launch("gated_residual", values)
    assert_same_bits({n: values[n] for n in apart}, apart)


@pytest.mark.parametrize(
    ("formats", "tokens"),
    [("float", 3), ("bf16, dynamic FP8 state, FP8 weights", 3), ("bf16, dynamic FP8 state, FP8 weights", 70)],
)
def test_same_bits_under_every_schedule(kernels: HostKernels, formats: str, tokens: int) -> None:
    sizes = {"tokens": tokens, "branches": 4, "hidden": 264 if tokens == 3 else 72, "rank": 16}
    assert_deterministic(gated_residual_case("pending", **sizes, **FORMATS[formats]), kernels)  # type: ignore[arg-type]


def test_a_token_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    case = gated_residual_case("pending", tokens=9, branches=4, hidden=64, rank=16, dtype=BF16)
    together, _ = case.run(kernels)
    per_token = ("r", "y", "s", "r_out", "x", "s_out")
    case.values |= {name: case.values[name][8:9] for name in per_token}
    alone, _ = case.run(kernels)
    assert_same_bits(alone, {name: t[8:9].contiguous() for name, t in together.items()})


def test_a_token_of_a_long_step_does_not_depend_on_its_neighbours(kernels: HostKernels) -> None:
    """Nor on how many they are: other numbers of tokens are cut into blocks otherwise, and lie elsewhere in a tile."""
    case = gated_residual_case("pending", tokens=17 * 64, branches=4, hidden=72, rank=136, dtype=BF16)
    together, _ = case.run(kernels)
    per_token = ("r", "y", "s", "r_out", "x", "s_out")
    some = slice(1000, 1050)
    case.values |= {name: case.values[name][some] for name in per_token}
    apart, _ = case.run(kernels)
    assert_same_bits(apart, {name: t[some].contiguous() for name, t in together.items()})


def test_official_sizes_move_every_byte_once(kernels: HostKernels) -> None:
    case = gated_residual_case("pending", tokens=1, **OFFICIAL, dtype=BF16)
    report = case.check(kernels, Execution(watch="sectors"))
    needed = sum(v.nbytes for v in case.values.values() if isinstance(v, torch.Tensor)) / 32
    assert report.launches == 2
    assert report.sectors <= 1.10 * needed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 12}, "multiple of 8"),
        ({"rank": 328}, "at most 320"),
        ({"branches": 5}, "1 to 4"),
    ],
)
def test_sizes_without_a_kernel_are_refused(kernels: HostKernels, change: dict[str, int], message: str) -> None:
    sizes = {"tokens": 1, "branches": 2, "hidden": 16, "rank": 8} | change
    with pytest.raises(PluginError, match=message):
        gated_residual_case("pending", **sizes).run(kernels)  # type: ignore[arg-type]


def test_a_wrong_shape_is_named(kernels: HostKernels) -> None:
    case = gated_residual_case("pending", tokens=2, branches=2, hidden=16, rank=8)
    case.values["s"] = torch.zeros(2, 3)
    with pytest.raises(PluginError, match=r"gated_residual: s must have shape"):
        case.run(kernels)
