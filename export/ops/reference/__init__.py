"""The meaning of every custom op in plain PyTorch: slow, readable, and what everything else is compared with.

One module per op, one function per form, arguments in the table's order, attributes by keyword. All arithmetic is
float32 (float64 when the inputs are). State tensors are updated IN PLACE and returned, as the kernels do it on a
device; `flashnext.export.ops.torch_ops` wraps the functions for tracing, where nothing may be changed in place.

`REFERENCES[op name][form name]` finds a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashnext.export.ops.reference import (
    fp8_residual,
    gated_delta_net,
    gated_residual,
    ngram_injection,
    sparse_attention,
    sparse_moe,
)

Reference = Callable[..., Any]
_RESIDUAL: dict[str, Reference] = {
    "embed": gated_residual.embed,
    "pending": gated_residual.pending,
    "settled": gated_residual.settled,
    "last": gated_residual.last,
}
_NGRAM: dict[str, Reference] = {"embed": ngram_injection.embed, "pending": ngram_injection.pending}
_ATTENTION: dict[str, Reference] = {
    "select": sparse_attention.select,
    "select_return": sparse_attention.select_return,
    "given": sparse_attention.given,
}

REFERENCES: dict[str, dict[str, Reference]] = {
    "GatedResidual": {
        **_RESIDUAL,
        **fp8_residual.references("GatedResidual", {**_RESIDUAL, "start": gated_residual.start}),
    },
    "NgramInjection": {**_NGRAM, **fp8_residual.references("NgramInjection", _NGRAM)},
    "GatedDeltaNet": {"default": gated_delta_net.default},
    "SparseAttention": {
        **_ATTENTION,
        **{f"{form}_fp8_cache": sparse_attention.fp8_cache(form, plain) for form, plain in _ATTENTION.items()},
    },
    "SparseMoE": {"plain": sparse_moe.plain, "fp8_block": sparse_moe.fp8_block, "nvfp4": sparse_moe.nvfp4},
}
