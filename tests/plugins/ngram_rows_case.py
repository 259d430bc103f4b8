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
NUMPY = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.uint8: np.uint8,
}
FORMS = {torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4"}
GROUP = 16


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
    """Random tokens with eos among them, ragged lengths, a table whose heads have different sizes. uint8: NVFP4."""
    rng = np.random.default_rng(seed)
    heads = (size - 1) * per_order
    sizes = [int(n) for n in rng.integers(3, 200, heads)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    multipliers = tuple(int(m) for m in rng.integers(-(2**62), 2**62, size))
    form = FORMS.get(table, "plain")
    count = sum(sizes) + 3
    codes = _codes(rng, count, columns // 2 if form == "nvfp4" else columns, table)
    row_scales = [_codes(rng, count, columns // GROUP, torch.float8_e4m3fn, signed=False)] if form == "nvfp4" else []
    scale = 1.0 if form == "plain" else 0.37
    spec = NgramSpec(
        1, "x", multipliers, tuple(sizes), tuple(offsets), per_order, EOS, columns, count, ("s",),
        form, "" if form == "plain" else "scale", ("r",) * len(row_scales),
    )  # fmt: skip
    tokens = rng.integers(0, 20, (batch, steps)).astype(np.int32)
    context = rng.integers(0, 20, (batch, size - 1)).astype(np.int32)
    new_len = rng.integers(0, steps + 1, batch).astype(np.int32)
    dtype = str(out).removeprefix("torch.")
    rows = HostRows(spec, NgramTable(spec, [codes], dtype, row_scales, scale), dtype, native=False)
    expected = rows.rows(tokens, context, new_len)
    rows.close()
    values: dict[str, Any] = {
        "table": _to_torch(codes, table),
        "row_scales": _to_torch(row_scales[0], torch.float8_e4m3fn) if row_scales else None,
        "columns": columns,
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


def _codes(rng: np.random.Generator, rows: int, columns: int, dtype: torch.dtype, signed: bool = True) -> Any:
    """Random rows; E4M3 of every code but the two that are NaN, and bytes of all codes."""
    if dtype == torch.uint8:
        return rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    if dtype != torch.float8_e4m3fn:
        return rng.normal(size=(rows, columns)).astype(NUMPY[dtype])
    codes = rng.integers(0, 0x7F, (rows, columns)) | rng.integers(0, 1 + signed, (rows, columns)) << 7
    return codes.astype(np.uint8).view(NUMPY[dtype])


def _to_torch(array: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.view(np.uint8).copy()).view(dtype).reshape(array.shape)
