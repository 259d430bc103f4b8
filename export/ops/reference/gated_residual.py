"""GatedResidual: write the pending block output into the branches, read the next block's input from them.

    R_i' = R_i + s_i * y
    Rn_i = RMSNorm(R_i'; gamma_i)
    G    = sigmoid(W_up . silu(W_down . vec(Rn) / n))
    x    = mean_i(G_i * Rn_i)
    s'   = 2 * sigmoid(W_inject . vec(Rn) / n)

The read uses the float32 value of R'; the store rounds it to the activation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.ops.reference.common import rms_norm, wide


def write(r: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """R + s * y per branch, not yet rounded: r [B, S, n, H], y [B, S, H], s [B, S, n]."""
    return wide(r) + wide(s)[..., None] * wide(y)[..., None, :]


def read(
    r: Tensor, norm_weight: Tensor, down_weight: Tensor, up_weight: Tensor, branches: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Block input x [B, S, H] and the normalised branches, flat [B, S, n*H]."""
    normed = rms_norm(r, norm_weight.unflatten(0, (branches, -1)), eps)
    flat = normed.flatten(-2)
    low = functional.silu(flat @ wide(down_weight).T / branches)
    gate = torch.sigmoid(low @ wide(up_weight).T).unflatten(-1, (branches, -1))
    return (gate * normed).mean(-2), flat


def write_gates(flat: Tensor, inject_weight: Tensor, branches: int) -> Tensor:
    """s [B, S, n] in (0, 2)."""
    return 2 * torch.sigmoid(flat @ wide(inject_weight).T / branches)


def embed(
    embedding: Tensor,
    norm_weight: Tensor,
    down_weight: Tensor,
    up_weight: Tensor,
    inject_weight: Tensor,
    *,
    branches: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    r = embedding[..., None, :].repeat(1, 1, branches, 1)
    x, s = settled(r, norm_weight, down_weight, up_weight, inject_weight, branches=branches, eps=eps)
    return r, x, s


def pending(
    r: Tensor,
    y: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    down_weight: Tensor,
    up_weight: Tensor,
    inject_weight: Tensor,
    *,
    branches: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    new = write(r, y, s)
    x, flat = read(new, norm_weight, down_weight, up_weight, branches, eps)
    return new.to(r.dtype), x.to(r.dtype), write_gates(flat, inject_weight, branches)


def settled(
    r: Tensor,
    norm_weight: Tensor,
    down_weight: Tensor,
    up_weight: Tensor,
    inject_weight: Tensor,
    *,
    branches: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    x, flat = read(r, norm_weight, down_weight, up_weight, branches, eps)
    return x.to(r.dtype), write_gates(flat, inject_weight, branches)


def start(start: Tensor, *weights: Tensor, branches: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Branches as they are given, to be stored: only a state in FP8 has this form."""
    x, s = settled(start, *weights, branches=branches, eps=eps)
    return start, x, s


def last(
    r: Tensor,
    y: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    down_weight: Tensor,
    up_weight: Tensor,
    *,
    branches: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    new = write(r, y, s)
    x, _ = read(new, norm_weight, down_weight, up_weight, branches, eps)
    return new.to(r.dtype), x.to(r.dtype)
