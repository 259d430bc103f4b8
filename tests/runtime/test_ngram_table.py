"""Quantized n-gram tables: rows are the codes times their scales, rounded once to the graph's dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashnext.export import number_formats
from flashnext.export.errors import CheckpointError
from flashnext.export.graphs.manifest import NgramSpec
from flashnext.runtime.ngram_table import NgramTable

E4M3 = ml_dtypes.float8_e4m3fn
COLUMNS, SHARDS = 32, ("s0", "s1", "s2")
CHOSEN = np.array([0, 3, 4, 39, 12, 12, 25], np.int64)


def spec(form: str, **changes: Any) -> NgramSpec:
    scales = {"scale": "scale", "row_scales": ("r0", "r1", "r2") if form == "nvfp4" else ()}
    fixed: dict[str, Any] = dict(layer=1, input="x", multipliers=(3, 5), head_sizes=(11, 13), head_offsets=(0, 11))
    rest: dict[str, Any] = dict(heads_per_ngram=2, eos=7, columns=COLUMNS, rows=40, shards=SHARDS, form=form)
    return NgramSpec(**{**fixed, **rest, **scales, **changes})


def codes(width: int, limit: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, limit, (40, width)).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_rows(dtype: str) -> None:
    table = codes(COLUMNS, 0x7F)
    rows = NgramTable(spec("fp8"), np.split(table.view(E4M3), [4, 25]), dtype, scale=0.37).gather(CHOSEN)
    want = (table.view(E4M3).astype(np.float32) * np.float32(0.37)).astype(rows.dtype)
    assert rows.dtype.name == dtype
    np.testing.assert_array_equal(rows, want[CHOSEN])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nvfp4_rows(dtype: str) -> None:
    packed, scales = codes(COLUMNS // 2, 256), codes(COLUMNS // 16, 0x7F).view(E4M3)
    parts = [np.split(a, [4, 25]) for a in (packed, scales)]
    rows = NgramTable(spec("nvfp4"), parts[0], dtype, parts[1], 0.0123).gather(CHOSEN)
    want = number_formats.dequantize_nvfp4(packed, scales, np.array(0.0123, np.float32)).astype(rows.dtype)
    np.testing.assert_array_equal(rows, want[CHOSEN])


def test_the_tables_bytes_are_not_copied() -> None:
    shards = np.split(codes(COLUMNS, 0x7F).view(E4M3), [4, 25])
    table = NgramTable(spec("fp8"), shards, "float32", scale=0.37)
    assert all(np.shares_memory(ours, theirs) for ours, theirs in zip(table.shards, shards, strict=True))


def test_a_scale_that_is_none_is_named_when_its_row_is_read() -> None:
    scales = np.full((40, 2), 0x38, np.uint8)
    scales[12, 1] = 0x7F
    parts = [np.split(a, [4, 25]) for a in (codes(COLUMNS // 2, 256), scales.view(E4M3))]
    table = NgramTable(spec("nvfp4"), parts[0], "float32", parts[1], 0.5)
    assert np.isfinite(table.gather(CHOSEN[:4])).all()
    with pytest.raises(CheckpointError, match="r1 holds NaN or a negative scale"):
        table.gather(CHOSEN)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_tables_that_are_none(scale: float) -> None:
    shards = np.split(codes(COLUMNS, 0x7F).view(E4M3), [4, 25])
    with pytest.raises(CheckpointError, match=r"scale is .*; a scale has to be a finite number above zero"):
        NgramTable(spec("fp8"), shards, "float32", scale=scale)
    with pytest.raises(CheckpointError, match=r"s0 is float8_e4m3fn; a plain table holds float32"):
        NgramTable(spec("plain"), shards, "float32")
    with pytest.raises(CheckpointError, match=r"needs E4M3 scales \[rows, 2\] for each of its 3 shards, found 0"):
        NgramTable(spec("nvfp4"), np.split(codes(COLUMNS // 2, 256), [4, 25]), "float32")
    with pytest.raises(CheckpointError, match="form 'int4' is not one of plain, fp8, nvfp4"):
        NgramTable(spec("int4"), shards, "float32")
