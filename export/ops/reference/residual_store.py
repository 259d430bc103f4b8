"""How the residual branches are stored in eight bits: formats, scales, rounding. Everything that stores them agrees
with this module bit for bit: the portable functions, the kernels, and what calibration measures.

    code  = round(value / scale)        saturating; value = code * scale
    scale   static: one per branch, from calibration
            dynamic: one per token and branch, the largest magnitude / the format's largest value

Values are float32 before they are rounded, quotient and product are float32 operations of their own (no fused
multiply-add), so that equal values give equal codes on every machine.

*Range.* Values beyond the format's range become its largest value, infinities too: a code is never NaN or infinite
unless the value is NaN. NaN passes on as a NaN code (a fault in the model stays visible) and does not count in a
dynamic scale. A dynamic scale stays between float32's smallest normal number and the one whose largest value is finite,
and is 1 for a branch of zeros; so a branch that nearly vanishes neither divides by zero nor comes back as NaN.

*Rounding* is to nearest, ties to even, or stochastic: up with the probability of the fraction of a step that is cut off
(Gupta et al., Deep Learning with Limited Numerical Precision, 2015, section 3). The draw is a hash of the seed and of
what is stored: the site (number of the store), the token's position, branch and channel. So a run repeats exactly,
whatever its batches and chunks. The hash is SplitMix64 (Steele, Lea, Flood, Fast Splittable Pseudorandom Number
Generators, 2014), three deep: integer operations only, which a kernel repeats bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashnext.export import residual_scales
from flashnext.export.residual_scales import LARGEST_FLOAT, SMALLEST_SCALE

MAX_BRANCHES = 256
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Format:
    """An 8-bit float: its largest value, bits of mantissa, and the exponent of its smallest normal number."""

    name: str
    dtype: torch.dtype
    largest: float
    mantissa_bits: int
    least_exponent: int


E4M3 = Format("e4m3", torch.float8_e4m3fn, residual_scales.FORMATS["e4m3"], 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, residual_scales.FORMATS["e5m2"], 2, -14)
FORMATS = {f.name: f for f in (E4M3, E5M2)}


@dataclass(frozen=True)
class StochasticRounding:
    """What the draws depend on: `positions` [...] of the tokens (integers), the store's number, the seed."""

    positions: Tensor
    site: int
    seed: int = 0


def quantize(values: Tensor, scale: Tensor, form: Format = E4M3, rounding: StochasticRounding | None = None) -> Tensor:
    """Codes [..., n, H] of branches [..., n, H], rounded to nearest unless `rounding` is given.

    `scale` is [n] (static) or [..., n] (dynamic), above zero.
    """
    quotient = values.float() / scale[..., None]
    if rounding is not None:
        quotient = _round_stochastically(quotient, uniform(rounding, *values.shape[-2:]), form)
    return quotient.clamp(-form.largest, form.largest).to(form.dtype)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 values [..., n, H] of codes [..., n, H]; `scale` as in `quantize`."""
    return codes.float() * scale[..., None]


def dynamic_scale(values: Tensor, form: Format = E4M3) -> Tensor:
    """float32 scales [..., n] for branches [..., n, H]: each branch's largest magnitude becomes the largest code."""
    magnitude = values.float().abs()
    most = torch.where(magnitude.isnan(), 0.0, magnitude).amax(-1)
    scale = (most.clamp_max(LARGEST_FLOAT) / form.largest).clamp_min(SMALLEST_SCALE)
    return torch.where(most > 0, scale, 1.0)


# --- stochastic rounding ----------------------------------------------------------------------------


def uniform(rounding: StochasticRounding, branches: int, channels: int) -> Tensor:
    """One draw for each element, float32 [..., branches, channels] in [0, 1): multiples of 2^-24.

    Raises:
        ValueError: a seed or number of branches that does not fit the key.
    """
    if not 0 <= rounding.seed <= MAX_SEED or not 0 < branches <= MAX_BRANCHES:
        raise ValueError(f"a seed is 0 … 2^63 - 1 and there are at most {MAX_BRANCHES} branches, found "
                         f"seed {rounding.seed} and {branches} branches")  # fmt: skip
    store = _splitmix64(torch.tensor(rounding.seed) + _times_golden(torch.tensor(rounding.site)))
    rows = rounding.positions.long()[..., None] * MAX_BRANCHES + torch.arange(branches)
    row = _splitmix64(store + _times_golden(rows))
    bits = _splitmix64(row[..., None] + _times_golden(torch.arange(channels)))
    return _shifted(bits, 40).float() * 2.0**-24


def _round_stochastically(x: Tensor, draw: Tensor, form: Format) -> Tensor:
    """x [...] on the format's grid: away from zero where the draw is below the fraction of a step that is left.

    Everything here is exact: a step is a power of two, and the fraction has no more bits than x.
    """
    magnitude = x.abs().clamp_max(form.largest)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp_min(form.least_exponent)
    places = form.mantissa_bits - exponent
    steps = torch.ldexp(magnitude, places)
    whole = steps.floor()
    return torch.ldexp(whole + (draw < steps - whole), -places).copysign(x)


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's output function of x + golden; int64 with wrap-around stands for unsigned arithmetic."""
    z = x + _GOLDEN
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _times_golden(x: Tensor) -> Tensor:
    return x * _GOLDEN


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right that fills with zeros (an int64's own fills with its sign)."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
