"""E4M3 codes as bytes, in plain operators: ONNX gathers and scatters no 8-bit floats, and has no view of their bits.

TensorRT for RTX gathers and scatters no bytes either. For it, codes stand in *words*: int32, four codes each in the
order of memory (little-endian), so that the same buffer is bound; only the last dimension is a fourth. Words are taken
apart and put together by arithmetic, since that builder has no operators on bits.

A code becomes its value by a table of 256. The other way is arithmetic, exact in float32: a value on the grid of its
exponent E (1 for subnormals) is a whole number of steps of 2^(E - 10), and its code is 8 (E - 1) plus that number. A
value that rounds up to the next power of two gets the next exponent's first code by the same sum.
"""

from __future__ import annotations

import numpy as np

from flashnext.export import number_formats
from flashnext.export.ops.portable.builder import Value
from flashnext.export.ops.portable.common import FLOAT
from flashnext.export.residual_scales import FORMATS

NAN, SIGN = 0x7F, 0x80
_EXPONENTS = np.arange(1, 16)
_STARTS = 2.0 ** (_EXPONENTS[1:] - 7)
"""Smallest values of the exponents 2 … 15."""
_STEPS = 2.0 ** (10 - _EXPONENTS)
"""Steps in 1, by exponent."""


BYTES, WORDS = "uint8", "int32"
STORED = (BYTES, WORDS)
"""dtypes that codes may stand in."""
CODES_OF_A_WORD = 4
_PLACES = np.array([1 << 8 * i for i in range(CODES_OF_A_WORD)])


def numbers(stored: Value, columns: int, axes: int) -> Value:
    """Codes [..., columns] as int32 numbers from 0 to 255, of bytes or words with `axes` dimensions before the last."""
    if stored.dtype == BYTES:
        return stored.cast("int32")
    body, negative = stored.body, (stored < 0).unsqueeze(-1)
    # Without the highest bit, words are not negative: runtimes differ about remainders of negative numbers.
    low = (stored < 0).where(stored - -(1 << 31), stored).unsqueeze(-1)
    number = (low // body.constant(_PLACES, WORDS)) % (1 << 8)
    top = negative.where(body.constant(_PLACES >> 24 << 7, WORDS), 0)
    return (number + top).reshape(*[0] * axes, columns)


def values(stored: Value, columns: int, axes: int) -> Value:
    """float32 values [..., columns] of codes, which `numbers` describes."""
    return stored.body.constant(number_formats.E4M3, FLOAT).gather(numbers(stored, columns, axes), 0)


def packed(codes: Value, dtype: str, axes: int) -> Value:
    """Numbers [..., columns] from 0 to 255, int32, as bytes, or as words [..., columns / 4]."""
    if dtype == BYTES:
        return codes.cast(BYTES)
    groups = codes.reshape(*[0] * axes, -1, CODES_OF_A_WORD)
    signed = groups - (groups >= SIGN).where(codes.body.constant(_PLACES >> 24 << 8, WORDS), 0)
    return (signed * codes.body.constant(_PLACES, WORDS)).reduce("Sum", -1)


def rounded(x: Value) -> Value:
    """Codes [...], int32, of float32 values [...]: to nearest, ties to even, saturated; NaN stays NaN."""
    body, largest = x.body, FORMATS["e4m3"]
    clamped = x.op("Min", largest).op("Max", -largest)
    magnitude = clamped.op("Abs")
    reached = magnitude.unsqueeze(-1) >= body.constant(_STARTS, FLOAT)
    number = reached.cast("int32").reduce("Sum", -1)  # exponent - 1
    steps = (magnitude * body.constant(_STEPS, FLOAT).gather(number, 0)).op("Round")
    code = (number.cast(FLOAT) * 8.0 + steps).cast("int32")
    # The reciprocal tells -0 from 0.
    signed = (body.constant(1.0, FLOAT) / clamped < 0.0).where(code + SIGN, code)
    return x.op("IsNaN", dtype="bool").where(NAN, signed)
