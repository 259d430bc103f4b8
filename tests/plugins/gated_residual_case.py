"""Cases of GatedResidual: every form, storage format and size, with the reference's results."""

from __future__ import annotations

from typing import Any

import torch
from kernel_checks import Case, normal, poisoned
from torch import Tensor

from flashnext.export.ops.reference import REFERENCES
from flashnext.export.ops.reference.residual_store import (
    StochasticRounding,
    dequantize,
    dynamic_scale,
    quantize,
)

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
SITE, SEED = 5, 0x1234567890ABCDEF
LONG = 33
"""From this many tokens on BF16 goes to tensor cores (plugins/gated_residual/limits.h)."""
GATE_TOLERANCE = 1e-3
"""Of s there: a sum of products whose operands are rounded to BF16 (2e-3 each), through a sigmoid."""
OFFICIAL = {"branches": 4, "hidden": 2560, "rank": 320}


def gated_residual_case(
    form: str,
    *,
    tokens: int,
    branches: int,
    hidden: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    state: str = "plain",
    fp8_weights: bool = False,
    stochastic: bool = False,
    seed: int = 0,
) -> Case:
    """`state`: "plain", or FP8 with "static" or "dynamic" scales; `stochastic`: how it is rounded."""
    g = torch.Generator().manual_seed(seed)
    columns = branches * hidden
    weights: dict[str, Tensor] = {
        "norm_weight": normal(g, columns, dtype=dtype, scale=0.2),
        "down_weight": normal(g, rank, columns, dtype=dtype, scale=columns**-0.5),
        "up_weight": normal(g, columns, rank, dtype=dtype, scale=rank**-0.5),
        "inject_weight": normal(g, branches, columns, dtype=dtype, scale=columns**-0.5),
    }
    r = normal(g, tokens, branches, hidden, dtype=dtype, scale=3.0)
    inputs: dict[str, Tensor] = {
        "embedding": normal(g, tokens, hidden, dtype=dtype),
        "start": r,
        "r": r,
        "y": normal(g, tokens, hidden, dtype=dtype),
        "s": torch.rand(tokens, branches, generator=g) * 2,
    }
    if form == "last":
        del weights["inject_weight"]
    given = {"embed": ["embedding"], "start": ["start"], "settled": ["r"]}.get(form, ["r", "y", "s"])
    inputs = {name: inputs[name] for name in given}
    values: dict[str, Any] = {**inputs, **weights, "eps": 1e-6}
    read: dict[str, Tensor] = dict(inputs)
    if state != "plain" and "r" in inputs:
        values |= _fp8_state(r.float(), state)
        read["r"] = dequantize(values["r"], _scale_of(values, "r"))
    if fp8_weights:
        for name, scale in (("down_weight", "down_scale"), ("up_weight", "up_scale")):
            values[name], values[scale], weights[name] = _fp8_rows(weights[name])
    values |= _outputs(form, tokens, branches, hidden, dtype, state)
    expected = _expected(form, read, weights, branches, dtype)
    if state != "plain" and "r_out" in values:
        if stochastic:
            positions = torch.randint(0, 1 << 26, (tokens,), generator=g, dtype=torch.int32)
            values |= {"positions": positions, "site": SITE, "seed": SEED}
        expected |= _expected_fp8_state(values, read, state)
    rounded = dtype == torch.bfloat16 and tokens >= LONG
    return Case("gated_residual", values, expected, tolerances={"s_out": GATE_TOLERANCE} if rounded else {})


def _outputs(form: str, tokens: int, branches: int, hidden: int, dtype: torch.dtype, state: str) -> dict[str, Tensor]:
    out = {"x": poisoned(tokens, hidden, dtype=dtype)}
    if form != "settled":
        out["r_out"] = poisoned(tokens, branches, hidden, dtype=dtype if state == "plain" else E4M3)
        if state == "static":
            out["r_out_scale"] = torch.linspace(0.03, 0.05, branches)
        if state == "dynamic":
            out["r_out_token_scale"] = poisoned(tokens, branches)
    if form != "last":
        out["s_out"] = poisoned(tokens, branches)
    return out


def _expected(
    form: str, inputs: dict[str, Tensor], weights: dict[str, Tensor], branches: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    batched = [t[None] for t in inputs.values()]
    plain = "settled" if form == "start" else form
    out = REFERENCES["GatedResidual"][plain](*batched, *weights.values(), branches=branches, eps=1e-6)
    names = {"settled": ("x", "s_out"), "last": ("r_out", "x")}.get(plain, ("r_out", "x", "s_out"))
    found = {name: t[0] for name, t in zip(names, out, strict=True)}
    return {name: t if name == "s_out" else t.to(dtype) for name, t in found.items()}


# --- FP8 --------------------------------------------------------------------------------------------


def _fp8_state(r: Tensor, state: str) -> dict[str, Tensor]:
    if state == "static":
        scale = torch.linspace(0.02, 0.04, r.shape[1])
        return {"r": quantize(r, scale), "r_scale": scale}
    scale = dynamic_scale(r)
    return {"r": quantize(r, scale), "r_token_scale": scale}


def _scale_of(values: dict[str, Any], name: str) -> Tensor:
    """[branches] or [tokens, branches]."""
    static: Tensor | None = values.get(f"{name}_scale")
    return static if static is not None else values[f"{name}_token_scale"]


def _expected_fp8_state(values: dict[str, Any], read: dict[str, Tensor], state: str) -> dict[str, Tensor]:
    """Stored codes (and dynamic scales) of the new state."""
    new = new_state(read, values["r_out"].shape)
    rounding = StochasticRounding(values["positions"], SITE, SEED) if "positions" in values else None
    if state == "static":
        return {"r_out": quantize(new, values["r_out_scale"], rounding=rounding)}
    scale = dynamic_scale(new)
    return {"r_out": quantize(new, scale, rounding=rounding), "r_out_token_scale": scale}


def new_state(read: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """float32 branches after the pending write."""
    if "embedding" in read:
        return read["embedding"].float()[..., None, :].expand(shape)
    if "start" in read:
        return read["start"].float()
    return read["r"].float() + read["s"][..., None] * read["y"].float()[..., None, :]


def _fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, one scale per row, and the values that they stand for."""
    scale = weight.float().abs().amax(-1) / LARGEST_E4M3
    codes = (weight.float() / scale[:, None]).to(E4M3)
    return codes, scale, codes.float() * scale[:, None]
