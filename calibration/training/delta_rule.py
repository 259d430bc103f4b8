"""The gated delta rule over whole sequences, in chunks, so that it can be differentiated and is not slow.

The recurrence of `flashnext.export.ops.reference.gated_delta_net`, rewritten as products of matrices (arXiv
2406.06484, section 3; with decay: arXiv 2412.06464). Within a chunk of C tokens, with c_i the sum of g up to token i,

    T = (I + tril(beta_i exp(c_i - c_j) k_i.k_j, -1))^-1
    U = T (beta v),   W = T (beta exp(c) k)

and the state S before the chunk enters through U - W S. Only a loop over chunks is left. Decays are exponentials of
sums that are never positive, so nothing can overflow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flashnext.export.model import layers
from flashnext.export.ops.reference.gated_delta_net import L2_EPS

CHUNK = 64


def gated_delta_net(module: layers.GatedDeltaNet, x: Tensor) -> Tensor:
    """The token mixer over whole sequences x [B, T, H], with no history before them."""
    attributes: dict[str, Any] = module.attributes
    key_heads: int = attributes["key_heads"]
    heads, value_dim = module.A_log.shape[0], module.norm.weight.shape[0]
    q, k, v = _convolved(module, x, key_heads, heads)
    g = -module.A_log.exp() * functional.softplus(module.in_proj_a(x) + module.dt_bias)
    y = chunked(q, k, v, g, torch.sigmoid(module.in_proj_b(x)))
    y = module.norm.weight * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + attributes["eps"])
    act = torch.sigmoid if attributes["gate"] == "sigmoid" else functional.silu
    z = module.in_proj_z(x).unflatten(-1, (heads, value_dim))
    out: Tensor = module.out_proj((y * act(z)).flatten(-2))
    return out


def causal_convolution(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution of x [B, T, C] by weight [C, 1, width]: a sum of shifted products."""
    width = weight.shape[-1]
    padded = functional.pad(x, (0, 0, (width - 1) * dilation, 0))
    length = x.shape[1]
    out = padded[:, :length] * weight[:, 0, 0]
    for tap in range(1, width):
        out = torch.addcmul(out, padded[:, tap * dilation : tap * dilation + length], weight[:, 0, tap])
    return out


def _convolved(module: layers.GatedDeltaNet, x: Tensor, key_heads: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (normalised, one for each value head) and v, all [B, T, V, D]."""
    mixed = functional.silu(causal_convolution(module.in_proj_qkv(x), module.conv1d.weight))
    values = module.in_proj_z.weight.shape[0]
    keys = (mixed.shape[-1] - values) // 2
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    q, k = (t.unflatten(-1, (key_heads, -1)) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_EPS) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = (t.repeat_interleave(heads // key_heads, dim=2) for t in (q, k))
    return q, k, v.unflatten(-1, (heads, -1))


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Outputs [B, T, V, Dv] of the rule for q, k [B, T, V, Dk], v [B, T, V, Dv], g and beta [B, T, V]."""
    length = q.shape[1]
    q, k, v = (_in_chunks(t, chunk) for t in (q, k, v))
    g, beta = (_in_chunks(t[..., None], chunk) for t in (g, beta))
    total = g.cumsum(-2)
    # exp(c_i - c_j) for j <= i; above the diagonal the difference is positive and not wanted.
    decay = (total - total.mT).tril().exp().tril()
    lower = ((beta * k) @ k.mT * decay).tril(-1)
    system = lower + torch.eye(chunk, dtype=q.dtype)
    right = torch.cat([beta * v, beta * total.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    y = _over_chunks(q * total.exp(), (q @ k.mT) * decay, u, w, k * (total[..., -1:, :] - total).exp(), total)
    return y.flatten(2, 3)[:, :, :length].transpose(1, 2)


def _over_chunks(q: Tensor, within: Tensor, u: Tensor, w: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Carry the state from chunk to chunk; all tensors [B, V, chunks, C, …]."""
    state = q.new_zeros(*q.shape[:2], k.shape[-1], u.shape[-1])
    outputs = []
    for c in range(q.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + within[:, :, c] @ new)
        state = total[:, :, c, -1:].exp() * state + k[:, :, c].mT @ new
    return torch.stack(outputs, dim=2)


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, V, D] -> [B, V, chunks, C, D]; zeros after the end neither decay nor write."""
    padded = functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % chunk))
    return padded.transpose(1, 2).unflatten(2, (-1, chunk))
