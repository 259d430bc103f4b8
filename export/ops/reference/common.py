"""What the reference ops share: the zero-centred RMSNorm, partial rotation, and the ring that holds recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The tensor in the reference's arithmetic: float32, or float64 where a test asks for it."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm over the last dimension: x / rms(x) * (1 + weight)."""
    x = wide(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + wide(weight))


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """RoPE on the first 2F columns of x [T, heads, D] at positions [T]; column i turns with column i + F."""
    angle = positions.to(inv_freq.dtype)[:, None, None] * inv_freq
    cos, sin = angle.cos() * scale, angle.sin() * scale
    half = inv_freq.shape[0]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def ring_history(ring: Tensor, past_len: int, count: int) -> Tensor:
    """Values [count, C] at positions past_len - count … past_len - 1 of one slot's ring [Q, C]; 0 before the start."""
    out = torch.zeros(count, ring.shape[1], dtype=ring.dtype)
    for i in range(count):
        position = past_len - count + i
        if position >= 0:
            out[i] = ring[position % ring.shape[0]]
    return out


def ring_write(ring: Tensor, past_len: int, values: Tensor) -> None:
    """Store values [T, C] of positions past_len … past_len + T - 1; the ring keeps the last Q of them."""
    size = ring.shape[0]
    for i in range(max(0, values.shape[0] - size), values.shape[0]):
        ring[(past_len + i) % size] = values[i]
