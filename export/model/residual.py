"""How the modules keep the residual branches: as they are, or in FP8, each store with its own scales.

A module that writes branches has a `ResidualStore`, which picks the op's form, adds the scales and hands on `Codes` in
place of a tensor. Static scales are buffers; in a graph they become initializers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flashnext.export.ops.torch_ops import call
from flashnext.export.residual_scales import ResidualStorage


class Codes(NamedTuple):
    """Branches in FP8: E4M3 codes [B, S, n, H], scale [n] or [B, S, n]; `dtype` is that of the activations."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype

    def values(self) -> Tensor:
        """float32 [B, S, n, H], in operators of their own."""
        return self.codes.float() * self.scale[..., None]


Branches = Tensor | Codes


class ResidualStore(nn.Module):
    """What one op writes with; a `mode` other than "static" needs no scales, nor does an op that only reads."""

    def __init__(self, mode: str = "plain", scale: Sequence[float] | None = None) -> None:
        super().__init__()
        self.mode = mode
        if scale is not None:
            # On the CPU even while the rest is built without memory: scales are few, and not among the parameters.
            self.scale = nn.Buffer(torch.tensor(scale, dtype=torch.float32, device="cpu"), persistent=False)

    def call(self, op: str, form: str, inputs: Sequence[Branches], *others: Tensor, **attributes: Any) -> Any:
        """Run an op in its form for this store; outputs as those of the plain form, with `Codes` for r_out."""
        held, *pending = inputs
        if self.mode == "plain":
            return call(op, form, *inputs, *others, **attributes)  # type: ignore[arg-type]
        first, scales = (held.codes, [held.scale]) if isinstance(held, Codes) else (held, [])
        writes = form != "settled"
        if writes and self.mode == "static":
            scales.append(self.scale)
        out = call(op, f"{form}_fp8_{self.mode}", first, *pending, *others, *scales, **attributes)  # type: ignore[arg-type]
        if not writes:
            return out
        codes, *rest = out
        scale = rest.pop() if self.mode == "dynamic" else self.scale
        return (Codes(codes, scale, held.dtype), *rest)


class LayerStores(NamedTuple):
    """The stores of one layer: what its first Gated Residual, its n-gram injection and its second one write."""

    before: ResidualStore
    ngram: ResidualStore
    mixer: ResidualStore

    @classmethod
    def of(cls, storage: ResidualStorage, before: str, prefix: str) -> LayerStores:
        """`before` names the store of the block before the layer, `prefix` is the layer's own name."""
        return cls(*(store_of(storage, name) for name in (before, f"{prefix}.ngram", f"{prefix}.mixer")))


def store_of(storage: ResidualStorage, name: str) -> ResidualStore:
    """A store by its name in `residual_scales.store_names`; without scales where nothing is stored by this name."""
    return ResidualStore(storage.mode, storage.scales.get(name))
