"""Cases of the n-gram rows that a device finds, with what the host's code finds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from kernel_checks import Case, poisoned

from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.ngram import HostRows
from flashnext.runtime.ngram_table import NgramTable

EOS = 7
NUMPY = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}


def ngram_rows_case(
    *,
    batch: int,
    steps: int,
    size: int = 3,
    per_order: int = 2,
    columns: int = 16,
    table: torch.dtype = torch.bfloat16,
    out: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    """Random tokens with eos among them, ragged lengths, a table whose heads have different sizes."""
    rng = np.random.default_rng(seed)
    heads = (size - 1) * per_order
    sizes = [int(n) for n in rng.integers(3, 200, heads)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    multipliers = tuple(int(m) for m in rng.integers(-(2**62), 2**62, size))
    codes = _codes(rng, sum(sizes) + 3, columns, table)
    scale = 0.37 if table == torch.float8_e4m3fn else 1.0
    spec = NgramSpec(
        1, "x", multipliers, tuple(sizes), tuple(offsets), per_order, EOS, columns, len(codes), ("s",),
        "fp8" if scale != 1 else "plain", "scale" if scale != 1 else "",
    )  # fmt: skip
    tokens = rng.integers(0, 20, (batch, steps)).astype(np.int32)
    context = rng.integers(0, 20, (batch, size - 1)).astype(np.int32)
    new_len = rng.integers(0, steps + 1, batch).astype(np.int32)
    dtype = str(out).removeprefix("torch.")
    rows = HostRows(spec, NgramTable(spec, [codes], dtype, scale=scale), dtype, native=False)
    expected = rows.rows(tokens, context, new_len)
    rows.close()
    values: dict[str, Any] = {
        "table": _to_torch(codes, table),
        "token_ids": torch.from_numpy(tokens),
        "context": torch.from_numpy(context),
        "new_len": torch.from_numpy(new_len),
        "multipliers": pairs(multipliers),
        "head_sizes": pairs(sizes),
        "head_offsets": pairs(offsets),
        "out": poisoned(batch, steps, heads * columns, dtype=out),
        "eos": EOS,
        "scale": scale,
    }
    return Case("ngram_rows", values, {"out": _to_torch(expected, out)})


def pairs(numbers: Any) -> torch.Tensor:
    """64-bit numbers as two of 32 bits, the low one first."""
    return torch.from_numpy(np.array(numbers, "<i8").view("<i4").reshape(-1, 2).copy())


def _codes(rng: np.random.Generator, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Random rows; E4M3 of every code but the two that are NaN."""
    if dtype != torch.float8_e4m3fn:
        return rng.normal(size=(rows, columns)).astype(NUMPY[dtype])
    codes = rng.integers(0, 0x7F, (rows, columns)) | rng.integers(0, 2, (rows, columns)) << 7
    return codes.astype(np.uint8).view(NUMPY[dtype])


def _to_torch(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8).copy()).view(dtype).reshape(array.shape)
