"""Expert weights of every format of SparseMoE, picked by index and dequantized to float32.

Codes come as bytes (fp8_codes.py says why); one of packed E2M1 becomes its two values by a table. Codes are picked
before anything is widened, so memory holds float32 values of the picked experts only.
"""

from __future__ import annotations

import numpy as np

from flashnext.export import number_formats
from flashnext.export.ops.portable import fp8_codes
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT
from flashnext.export.ops.portable.context import Context


def pick(c: Context, which: str, experts: Value, lead: tuple[int, ...]) -> Value:
    """Weights `which` ("gate_up", "down") of the experts: [experts…, 2 * I, H] or [experts…, H, I].

    `lead` is one 0 for each axis of `experts`: what Reshape takes for axes that stay.
    """
    inner, hidden = c.sizes["I"], c.sizes["H"]
    rows, columns = (2 * inner, hidden) if which == "gate_up" else (hidden, inner)
    if c.form == "plain":
        values = c[f"{which}_weight"].gather(experts, 0).cast(FLOAT)
    elif c.dtypes["C"] not in fp8_codes.STORED:
        raise ValueError(f"a portable SparseMoE takes E4M3 codes as bytes or words, not {c.dtypes['C']}")
    else:
        axes = len(lead) + (2 if which == "gate_up" else 1)  # before a row's columns
        values = (_fp8_block if c.form == "fp8_block" else _nvfp4)(c, which, experts, axes)
    return values.reshape(*lead, rows, columns)


def _fp8_block(c: Context, which: str, experts: Value, axes: int) -> Value:
    scale = c[f"{which}_scale"].gather(experts, 0)
    for axis, size in zip((-2, -1), _matrix(c, which), strict=True):
        block_of = np.arange(size) // number_formats.BLOCK  # repeats a block's scale; the last block may be cut off
        scale = scale.gather(c.body.constant(block_of, "int64"), axis)
    return fp8_codes.values(c[f"{which}_weight"].gather(experts, 0), _matrix(c, which)[1], axes) * scale


def _nvfp4(c: Context, which: str, experts: Value, axes: int) -> Value:
    """[experts…, rows, bytes, 2]: the two values of a byte still have an axis of their own."""
    byte_count, group_count = _matrix(c, which)[1] // 2, _matrix(c, which)[1] // number_formats.GROUP
    table = c.body.constant(number_formats.E2M1_PAIRS, FLOAT)
    pairs = table.gather(fp8_codes.numbers(c[f"{which}_weight"].gather(experts, 0), byte_count, axes), 0)
    scale_2 = c[f"{which}_scale_2"].gather(experts, 0).unsqueeze(-1, -2)
    scale = fp8_codes.values(c[f"{which}_scale"].gather(experts, 0), group_count, axes) * scale_2
    group_of = np.arange(byte_count) // (number_formats.GROUP // 2)
    return pairs * scale.gather(c.body.constant(group_of, "int64"), -1).unsqueeze(-1)


def _matrix(c: Context, which: str) -> tuple[int, int]:
    inner, hidden = c.sizes["I"], c.sizes["H"]
    return (inner, hidden) if which == "gate_up" else (hidden, inner)
