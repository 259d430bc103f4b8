"""E4M3 codes as bytes, in plain operators: ONNX gathers and scatters no 8-bit floats, and has no view of their bits.

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


def values(codes: Value) -> Value:
    """float32 values of codes [...], uint8."""
    return codes.body.constant(number_formats.E4M3, FLOAT).gather(codes.cast("int32"), 0)


def rounded(x: Value) -> Value:
    """Codes [...], uint8, of float32 values [...]: to nearest, ties to even, saturated; NaN stays NaN."""
    body, largest = x.body, FORMATS["e4m3"]
    clamped = x.op("Min", largest).op("Max", -largest)
    magnitude = clamped.op("Abs")
    reached = magnitude.unsqueeze(-1) >= body.constant(_STARTS, FLOAT)
    number = reached.cast("int32").reduce("Sum", -1)  # exponent - 1
    steps = (magnitude * body.constant(_STEPS, FLOAT).gather(number, 0)).op("Round")
    code = (number.cast(FLOAT) * 8.0 + steps).cast("int32")
    # The reciprocal tells -0 from 0.
    signed = (body.constant(1.0, FLOAT) / clamped < 0.0).where(code + SIGN, code)
    return x.op("IsNaN", dtype="bool").where(NAN, signed).cast("uint8")
