"""Cases of the candidate selection, with what a stable sort and a sum in double precision give."""

from __future__ import annotations

import torch
from kernel_checks import Case, normal, poisoned


def candidates_case(
    *,
    rows: int,
    vocabulary: int,
    count: int,
    dtype: torch.dtype = torch.float32,
    logits: str = "free",
    seed: int = 0,
    temperature: float = 1.0,
    scale: float = 1.0,
) -> Case:
    """`logits`: "free" (times `scale`), "tied" (few values, both zeros among them), "equal" or "infinite" (most of them
    -inf)."""
    g = torch.Generator().manual_seed(seed)
    values = normal(g, rows, vocabulary, dtype=dtype, scale=scale)
    if logits == "tied":
        values = values.round()
    if logits == "equal":
        values.zero_()
    if logits == "infinite":
        values[values < 2] = -torch.inf
    best = values.float().sort(dim=-1, descending=True, stable=True)
    expected = {"values": best.values[:, :count], "indices": best.indices[:, :count].int()}
    exponents = (values.double() - values.double().amax(-1, keepdim=True)) / temperature
    expected["sums"] = exponents.exp().sum(-1).float()
    outputs = {"values": poisoned(rows, count), "indices": poisoned(rows, count, dtype=torch.int32)}
    values = {"logits": values, **outputs, "sums": poisoned(rows), "inverse_temperature": 1 / temperature}
    return Case("candidates", values, expected)
