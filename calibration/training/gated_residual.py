"""The Gated Residual as one differentiable step with a backward pass of its own.

    R = r + s y,  h = R / rms(R),  f = h (1 + gamma)
    G = sigmoid(U silu(D f / n)),  x = mean_i(G_i f_i),  t = 2 sigmoid(I f / n)

A small model passes over its branches far more often than it multiplies matrices, and what autograd makes of the
reference op passes over them about three times as often as is needed. The reference stays the meaning: the tests
compare values and gradients with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashnext.export.model import layers

Flow = tuple[Tensor, Tensor | None, Tensor | None]
"""Branches r [B, T, n, H], and the block output y and write gates s still to be written (none at the start)."""


def advance(module: layers.GatedResidual, flow: Flow) -> tuple[Tensor, Tensor, Tensor]:
    """Branches after the pending write, the next block's input x, and its write gates (empty for a final one)."""
    r, y, s = flow
    if y is None or s is None:
        y, s = torch.zeros_like(r[..., 0, :]), torch.zeros_like(r[..., 0])
    inject = module.block_inject_weight
    return _GatedResidual.apply(  # type: ignore[no-any-return, no-untyped-call]
        r,
        y,
        s,
        module.hc_norm.weight,
        module.input_mix_weight_down.weight,
        module.input_mix_weight_up.weight,
        module.hc_norm.weight.new_empty(0, module.hc_norm.weight.shape[0]) if inject is None else inject.weight,
        float(module.attributes["eps"]),
    )


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, r: Tensor, y: Tensor, s: Tensor, gamma: Tensor, down: Tensor, up: Tensor, inject: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        branches, width = r.shape[-2:]
        out = torch.addcmul(r, s[..., None], y[..., None, :])
        scale = (torch.linalg.vector_norm(out, dim=-1, keepdim=True).square_() / width + eps).rsqrt_()
        h = out * scale
        f = (h * (1 + gamma).view(branches, width)).view(-1, branches * width)
        a = f @ down.T / branches
        gate = (torch.nn.functional.silu(a) @ up.T).sigmoid_()
        x = (gate * f).view(*r.shape).sum(-2) / branches
        t = 2 * torch.sigmoid(f @ inject.T / branches)
        ctx.save_for_backward(y, s, scale, h, f, a, gate, t, gamma, down, up, inject)
        return out, x, t.view(*r.shape[:-2], -1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_x: Tensor, d_t: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, s, scale, h, f, a, gate, t, gamma, down, up, inject = ctx.saved_tensors
        branches, width = h.shape[-2:]
        mean_x = (d_x / branches)[..., None, :]
        d_gate = (f.view_as(h) * mean_x).view_as(f).mul_(gate).mul_(1 - gate)
        d_f = (gate.view_as(h) * mean_x).view_as(f)
        open_ = torch.sigmoid(a)
        low = a * open_
        d_a = (d_gate @ up).mul_(open_ + low * (1 - open_)).div_(branches)
        d_s_next = (d_t.reshape_as(t) * t).mul_(1 - t / 2).div_(branches)
        d_f.addmm_(d_a, down).addmm_(d_s_next, inject)
        d_gamma = (d_f * h.view_as(f)).sum(0)
        d_h = d_f.view_as(h) * (1 + gamma).view(branches, width)
        along = (d_h * h).sum(-1, keepdim=True) / -width
        d_r = torch.addcmul(d_out, torch.addcmul(d_h, h, along), scale)
        d_y = (s[..., None, :] @ d_r).squeeze(-2)
        d_s = (d_r @ y[..., None]).squeeze(-1)
        return d_r, d_y, d_s, d_gamma, d_a.T @ f, d_gate.T @ low, d_s_next.T @ f, None
