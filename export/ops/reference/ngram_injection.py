"""NgramInjection: pending write, then the gated n-gram value and its dilated convolution on every branch.

    d_i    = <RMSNorm(key)_i, RMSNorm(R_i)> / sqrt(H)
    gate_i = sigmoid(sgn(d_i) * sqrt(max(|d_i|, 1e-6)))
    u_i    = gate_i * value
    R_i'   = R_i + u_i + silu(conv(RMSNorm(u)_i))      depthwise, causal, taps `dilation` tokens apart

The convolution's inputs are kept by position in a ring: later tokens overwrite those of rejected drafts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.ops.reference.common import ring_history, ring_write, rms_norm, wide
from flashnext.export.ops.reference.gated_residual import write


def pending(
    r: Tensor, y: Tensor, s: Tensor, *inputs: Tensor, branches: int, eps: float, dilation: int
) -> tuple[Tensor, Tensor]:
    return _inject(write(r, y, s), r.dtype, *inputs, branches=branches, eps=eps, dilation=dilation)


def embed(embedding: Tensor, *inputs: Tensor, branches: int, eps: float, dilation: int) -> tuple[Tensor, Tensor]:
    r = wide(embedding)[..., None, :].repeat(1, 1, branches, 1)
    return _inject(r, embedding.dtype, *inputs, branches=branches, eps=eps, dilation=dilation)


def _inject(
    r: Tensor,
    dtype: torch.dtype,
    key: Tensor,
    value: Tensor,
    norm_key_weight: Tensor,
    norm_query_weight: Tensor,
    norm_conv_weight: Tensor,
    conv_weight: Tensor,
    slots: Tensor,
    past_len: Tensor,
    new_len: Tensor,
    conv_state: Tensor,
    *,
    branches: int,
    eps: float,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.unflatten(0, (branches, -1)), eps)

    similarity = norm(key.unflatten(-1, (branches, -1)), norm_key_weight) * norm(r, norm_query_weight)
    d = similarity.sum(-1, keepdim=True) / math.sqrt(r.shape[-1])
    gate = torch.sigmoid(d.sign() * d.abs().clamp_min(1e-6).sqrt())
    u = gate * wide(value)[..., None, :]
    conv_in = norm(u, norm_conv_weight).flatten(-2).to(conv_state.dtype)
    conv = torch.zeros_like(conv_in, dtype=r.dtype)
    reach = (conv_weight.shape[-1] - 1) * dilation
    for row, (slot, past, new) in enumerate(zip(slots.tolist(), past_len.tolist(), new_len.tolist(), strict=True)):
        if new == 0:
            continue
        history = ring_history(conv_state[slot], past, reach)
        window = wide(torch.cat([history, conv_in[row, :new]])).T[None]
        out = functional.conv1d(window, wide(conv_weight), groups=conv_weight.shape[0], dilation=dilation)
        conv[row, :new] = functional.silu(out[0].T)
        ring_write(conv_state[slot], past, conv_in[row, :new])
    return (r + u + conv.unflatten(-1, (branches, -1))).to(dtype), conv_state
