"""GatedDeltaNet: causal convolution, commit of the accepted pending tokens, gated delta rule, gated RMSNorm.

Per value head, with S [Dk, Dv] in float32 (stored BF16 if the state is: rounded once per step):

    S <- exp(g) * S;  e = v - S^T k;  S <- S + beta * k e^T;  y = S^T q

The tokens of a step with S <= W are pending: their k, v, g, beta are stored, the recurrent state stays at the last
committed token, and the next step's `accepted` says how many of them it commits first. A step with S > W commits its
tokens at once and leaves nothing pending. No state is ever rolled back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.ops.reference.common import ring_history, ring_write, wide

L2_EPS = 1e-6
"""Epsilon under the root of the q and k normalisation (the model family's fixed value)."""


def delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token of the gated delta rule: state [V, Dk, Dv], k [V, Dk], v [V, Dv], g and beta [V]."""
    state = g.exp()[:, None, None] * state
    error = v - (state * k[:, :, None]).sum(1)
    return state + beta[:, None, None] * k[:, :, None] * error[:, None, :]


def default(
    qkv: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    past_len: Tensor,
    accepted: Tensor,
    new_len: Tensor,
    conv_state: Tensor,
    recurrent_state: Tensor,
    pending_state: Tensor,
    *,
    eps: float,
    key_heads: int,
    gate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, window = qkv.shape[1], pending_state.shape[1]
    _, heads, key_dim, value_dim = recurrent_state.shape
    y = torch.zeros(*z.shape[:2], heads, value_dim, dtype=wide(recurrent_state[:0]).dtype)
    decay = -wide(A_log).exp() * functional.softplus(wide(a) + wide(dt_bias))
    beta = torch.sigmoid(wide(b))
    rows = zip(slots.tolist(), past_len.tolist(), accepted.tolist(), new_len.tolist(), strict=True)
    for row, (slot, past, kept, new) in enumerate(rows):
        if new == 0:
            continue
        state = wide(recurrent_state[slot]) if past > kept else torch.zeros_like(wide(recurrent_state[slot]))
        for k, v, g, bt in zip(*_unpack(pending_state[slot, :kept], key_heads, heads, key_dim, value_dim), strict=True):
            state = delta_step(state, _per_value_head(k, heads), v, g, bt)
        q, k, v = _convolved(qkv[row, :new], conv_state[slot], past, conv_weight, key_heads, key_dim, heads)
        committed = state
        for t in range(new):
            state = delta_step(state, _per_value_head(k[t], heads), v[t], decay[row, t], beta[row, t])
            y[row, t] = (state * _per_value_head(q[t], heads)[:, :, None]).sum(1)
        pending_state[slot] = 0
        if steps <= window:
            pending_state[slot, :new] = torch.cat([k.flatten(1), v.flatten(1), decay[row, :new], beta[row, :new]], -1)
            recurrent_state[slot] = committed
        else:
            recurrent_state[slot] = state
    out = wide(norm_weight) * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    act = torch.sigmoid if gate == "sigmoid" else functional.silu
    out = out.flatten(-2) * act(wide(z))
    return out.to(z.dtype), conv_state, recurrent_state, pending_state


def _convolved(
    qkv: Tensor, ring: Tensor, past: int, conv_weight: Tensor, key_heads: int, key_dim: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, K, Dk] (normalised, q scaled) and v [T, V, Dv] of one row; the ring takes the new conv inputs."""
    window = wide(torch.cat([ring_history(ring, past, conv_weight.shape[-1] - 1), qkv.to(ring.dtype)]))
    ring_write(ring, past, qkv.to(ring.dtype))
    mixed = functional.silu(functional.conv1d(window.T[None], wide(conv_weight), groups=conv_weight.shape[0])[0].T)
    q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, mixed.shape[1] - 2 * key_heads * key_dim], dim=-1)
    q, k = (_unit(t.unflatten(-1, (key_heads, key_dim))) for t in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(-1, (heads, -1))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """[K, Dk] -> [V, Dk]: each key head serves V/K consecutive value heads."""
    return x.repeat_interleave(heads // x.shape[0], dim=0)


def _unpack(
    pending: Tensor, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k, v, g, beta = pending.split([key_heads * key_dim, heads * value_dim, heads, heads], dim=-1)
    return k.unflatten(-1, (key_heads, key_dim)), v.unflatten(-1, (heads, value_dim)), g, beta
