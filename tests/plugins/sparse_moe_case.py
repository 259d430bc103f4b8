"""Cases of SparseMoE: every weight format, with the reference's results."""

from __future__ import annotations

from typing import Any

import torch
from kernel_checks import Case, normal, poisoned
from torch import Tensor

from flashnext.export.ops.reference import REFERENCES

E4M3 = torch.float8_e4m3fn
OFFICIAL = {"hidden": 2560, "inner": 640, "top_k": 10}
BLOCK, GROUP = 128, 16
FORMS = {"plain": "plain", "fp8": "fp8_block", "nvfp4": "nvfp4"}


def sparse_moe_case(
    weights: str,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    normalize: int = 1,
    dtype: torch.dtype = torch.float32,
    logits: str | Tensor = "free",
    seed: int = 0,
) -> Case:
    """`weights`: "plain", "fp8" or "nvfp4"; `logits`: "free", "tied" (few values), "equal", "extreme" or given."""
    g = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {
        "x": normal(g, tokens, hidden, dtype=dtype),
        "router_logits": (logits if isinstance(logits, Tensor) else _logits(g, logits, tokens, experts)).to(dtype),
    }
    gate_up = normal(g, experts, 2, inner, hidden, dtype=dtype, scale=hidden**-0.5)
    down = normal(g, experts, hidden, inner, dtype=dtype, scale=inner**-0.5)
    make = {"plain": _plain, "fp8": _fp8, "nvfp4": _nvfp4}[weights]
    stored = {**make("gate_up", gate_up), **make("down", down)}
    ports = [stored[name].contiguous() for name in stored]
    batched = [inputs["x"][None], inputs["router_logits"][None]]
    want = REFERENCES["SparseMoE"][FORMS[weights]](*batched, *ports, top_k=top_k, normalize=normalize)[0]
    values = {**inputs, **stored, "y": poisoned(tokens, hidden, dtype=dtype), "inner": inner}
    return Case("sparse_moe", {**values, "top_k": top_k, "normalize": normalize}, {"y": want})


def _logits(g: torch.Generator, kind: str, tokens: int, experts: int) -> Tensor:
    free = torch.randn(tokens, experts, generator=g)
    return {"free": free, "tied": free.round(), "equal": torch.zeros_like(free), "extreme": free * 200}[kind]


def _plain(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{name}_weight": weight}


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Random codes that are no NaN, and powers of two as scales."""
    g = torch.Generator().manual_seed(weight.numel())
    codes = torch.randint(0, 0x7F, weight.shape, generator=g, dtype=torch.uint8)
    codes |= torch.randint(0, 2, weight.shape, generator=g, dtype=torch.uint8) << 7
    rows, columns = (-(-size // BLOCK) for size in weight.shape[-2:])
    scale = torch.exp2(torch.randint(-14, -10, (*weight.shape[:-2], rows, columns), generator=g).float())
    return {f"{name}_weight": codes.view(E4M3), f"{name}_scale": scale}


def _nvfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Random codes: each is a valid number."""
    g = torch.Generator().manual_seed(weight.numel())
    packed = torch.randint(0, 256, (*weight.shape[:-1], weight.shape[-1] // 2), generator=g, dtype=torch.uint8)
    groups = (*weight.shape[:-1], weight.shape[-1] // GROUP)
    scale = (0.5 + torch.rand(groups, generator=g)).to(E4M3)
    scale_2 = (0.5 + torch.rand(weight.shape[:-2], generator=g)) * weight.shape[-1] ** -0.5
    return {f"{name}_weight": packed, f"{name}_group_scale": scale, f"{name}_scale_2": scale_2}
