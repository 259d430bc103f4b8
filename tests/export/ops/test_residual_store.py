"""The storage of the residual branches: rounding, range, scales, and stochastic rounding that repeats exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashnext.export.checkpoint.ngram_constants import GOLDEN, MASK64, splitmix64
from flashnext.export.ops.reference.residual_store import (
    E4M3,
    FORMATS,
    Format,
    StochasticRounding,
    dequantize,
    dynamic_scale,
    quantize,
    uniform,
)

ALL_FORMATS = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=True), min_size=1, max_size=40)
SCALES = st.floats(2.0**-60, 2.0**60, width=32)
LEAST = float(np.finfo(np.float32).tiny)


def grid(form: Format) -> torch.Tensor:
    """Every value of the format from zero up."""
    values = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    return values[values.isfinite() & (values >= 0) & ~torch.signbit(values)].sort().values


def one(values: list[float] | torch.Tensor) -> torch.Tensor:
    """A single branch [1, 1, H]."""
    return torch.as_tensor(values, dtype=torch.float32)[None, None]


def rounding(seed: int = 0, site: int = 0, positions: tuple[int, ...] = (0,)) -> StochasticRounding:
    return StochasticRounding(torch.tensor(positions), site, seed)


@ALL_FORMATS
def test_every_code_comes_back(form: Format) -> None:
    values = one(torch.cat([grid(form), -grid(form)]))
    for scale in (1.0, 0.25, 2.0**-100):
        codes = quantize(values * scale, torch.tensor([scale]), form)
        assert torch.equal(dequantize(codes, torch.tensor([scale])), values * scale)
        assert torch.equal(quantize(values, torch.ones(1), form, rounding()).float(), values)


@ALL_FORMATS
def test_ties_go_to_even_codes(form: Format) -> None:
    values = grid(form)
    middle = (values[1:] + values[:-1]) / 2
    codes = quantize(one(middle), torch.ones(1), form).view(torch.uint8).flatten()
    assert (codes % 2 == 0).all()
    above = quantize(one(torch.nextafter(middle, values[1:])), torch.ones(1), form).float().flatten()
    below = quantize(one(torch.nextafter(middle, values[:-1])), torch.ones(1), form).float().flatten()
    assert torch.equal(above, values[1:])
    assert torch.equal(below, values[:-1])


@ALL_FORMATS
@given(values=FLOATS, scale=SCALES, stochastic=st.booleans())
def test_bounds(form: Format, values: list[float], scale: float, stochastic: bool) -> None:
    """Never NaN or infinite; inside the range at most half a step away (a whole one when rounding stochastically)."""
    x, scales = one(values), torch.tensor([scale])
    codes = quantize(x, scales, form, rounding() if stochastic else None)
    stored = codes.float().double()
    assert stored.isfinite().all()
    exact = (x / scales).double().clamp(-form.largest, form.largest)
    step = 2.0 ** (torch.floor(torch.log2(exact.abs().clamp_min(2.0**form.least_exponent))) - form.mantissa_bits)
    error = (stored - exact).abs() / step
    assert (error < 1).all() if stochastic else (error <= 0.5).all()
    assert (stored.abs() <= form.largest).all()
    assert torch.equal(torch.signbit(codes.float()), torch.signbit(x))


@ALL_FORMATS
@pytest.mark.parametrize("stochastic", [False, True])
def test_saturates(form: Format, stochastic: bool) -> None:
    beyond = [form.largest * 1.01, form.largest * 2, 1e38, math.inf]
    codes = quantize(one([*beyond, *(-v for v in beyond)]), torch.ones(1), form, rounding() if stochastic else None)
    assert codes.float().flatten().tolist() == [form.largest] * 4 + [-form.largest] * 4


@ALL_FORMATS
def test_nan_stays_visible(form: Format) -> None:
    codes = quantize(one([math.nan, 1.0]), torch.ones(1), form).float().flatten()
    assert codes.isnan().tolist() == [True, False]


@ALL_FORMATS
def test_subnormals_keep_the_smallest_step(form: Format) -> None:
    step = 2.0 ** (form.least_exponent - form.mantissa_bits)
    values = [step, 0.5 * step, 0.75 * step, 1.5 * step, 1e-30, -1e-30, 0.0]
    assert [v / step for v in quantize(one(values), torch.ones(1), form).float().flatten().tolist()] == [
        1, 0, 1, 2, 0, 0, 0,
    ]  # fmt: skip


# --- dynamic scales ---------------------------------------------------------------------------------


@ALL_FORMATS
@given(values=FLOATS)
def test_dynamic_scale(form: Format, values: list[float]) -> None:
    """The largest magnitude gets the largest code, and whatever a branch holds, its values come back finite."""
    x = one(values)
    scale = dynamic_scale(x, form)
    assert (scale >= LEAST).all()
    codes = quantize(x, scale, form)
    assert dequantize(codes, scale).isfinite().all()
    largest = float(x.abs().max())
    if form.largest * LEAST <= largest < math.inf:
        assert float(codes.float().abs().max()) == form.largest


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.0, -0.0], 1.0),
        ([448.0, -3.0], 1.0),
        ([-896.0, 0.0], 2.0),
        ([1e-45, 0.0], LEAST),
        ([math.inf, 1.0], np.finfo(np.float32).max / np.float32(448)),
        ([math.nan, 448.0], 1.0),
        ([math.nan], 1.0),
    ],
)
def test_dynamic_scale_by_hand(values: list[float], scale: float) -> None:
    assert dynamic_scale(one(values)).item() == scale


def test_each_token_and_branch_has_its_own_scale() -> None:
    x = torch.tensor([[[[448.0, 1], [224, -2]], [[0, 0], [1, -896]]]])
    assert dynamic_scale(x).tolist() == [[[1.0, 0.5], [1.0, 2.0]]]
    static = quantize(x, torch.tensor([1.0, 2.0]))
    assert dequantize(static, torch.tensor([1.0, 2.0])).equal(x)


# --- stochastic rounding ----------------------------------------------------------------------------


def draw(seed: int, site: int, position: int, branch: int, channel: int) -> float:
    """The hash in Python's integers."""
    store = splitmix64((seed + GOLDEN * site) & MASK64)
    row = splitmix64((store + GOLDEN * (position * 256 + branch)) & MASK64)
    return (splitmix64((row + GOLDEN * channel) & MASK64) >> 40) * 2.0**-24


@given(seed=st.integers(0, 2**63 - 1), site=st.integers(0, 4000), position=st.integers(0, 2**26))
def test_draws_are_a_hash_of_the_key(seed: int, site: int, position: int) -> None:
    drawn = uniform(rounding(seed, site, (position, 3)), 3, 5)
    assert drawn[0].tolist() == [[draw(seed, site, position, b, c) for c in range(5)] for b in range(3)]
    assert drawn.shape == (2, 3, 5)


def test_a_draw_depends_on_every_part_of_the_key() -> None:
    first = uniform(rounding(1, 2, (3,)), 4, 64)
    for other in (rounding(2, 2, (3,)), rounding(1, 3, (3,)), rounding(1, 2, (4,))):
        assert not torch.isclose(first, uniform(other, 4, 64)).any()
    assert first.unique().numel() == first.numel()


@ALL_FORMATS
@pytest.mark.parametrize("value", [1.03, 3.3 * 2.0**-16, 0.1 * 2.0**-16, 300.7, -1.03])
def test_stochastic_rounding_has_no_bias(form: Format, value: float) -> None:
    x = torch.full((1, 100_000), value)
    stored = quantize(x, torch.ones(1), form, StochasticRounding(torch.tensor(0), 0)).double()
    found = stored.unique()
    assert found.numel() == 2
    spread = float(found[1] - found[0])
    assert abs(float(stored.mean()) - float(x[0, 0].double())) < 4 * 0.5 * spread / math.sqrt(x.numel())


def test_neighbours_do_not_matter() -> None:
    x = torch.randn(2, 5, 4, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [70, 71, 72, 73, 74]])
    whole = quantize(x, torch.full((4,), 0.01), E4M3, StochasticRounding(positions, 3, 9))
    part = quantize(x[1:, 2:], torch.full((4,), 0.01), E4M3, StochasticRounding(positions[1:, 2:], 3, 9))
    assert torch.equal(whole[1:, 2:].view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**63}])
def test_seeds_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a seed is 0"):
        uniform(rounding(**wrong), 2, 2)
