"""The 8- and 4-bit number formats of quantized checkpoints, in numpy: tables of their values, and dequantization.

FP8 here is E4M3 (`F8_E4M3`: no infinities, codes 0x7F and 0xFF are NaN). A weight in *block FP8* has one scale per
128x128 block of its last two axes (`weight_scale_inv`; the last block of an axis may be cut off): value = code * scale.

*NVFP4* packs two E2M1 codes into a byte, the element with the lower index in the low nibble (as ModelOpt does). 16
consecutive elements of the last axis share an E4M3 scale, and the whole tensor an F32 one:
value = code * (scale * global scale).

Products are float32. E4M3 has 4 significant bits and E2M1 2, so code * scale is exact for a BF16 scale.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]

BLOCK = 128
"""Rows and columns of a block-FP8 scale's block."""
GROUP = 16
"""Elements that share an NVFP4 scale."""

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Value of each FP8 code."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])
"""Value of each FP4 code; bit 3 is the sign."""
E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)
"""Both values of a byte of packed FP4 codes: [256, 2], low nibble first."""


def codes(array: Array) -> NDArray[np.uint8]:
    """The bytes of an array of one-byte elements, without a copy."""
    return array.view(np.uint8)


def dequantize_fp8_block(weight: Array, scale: Array) -> Floats:
    """[…, R, C] codes and […, ceil(R/128), ceil(C/128)] scales -> values."""
    rows, columns = (np.arange(size) // BLOCK for size in weight.shape[-2:])
    values: Floats = E4M3[codes(weight)] * scale.astype(np.float32)[..., rows[:, None], columns]
    return values


def dequantize_nvfp4(packed: Array, scale: Array, global_scale: Array) -> Floats:
    """[…, C/2] packed codes, […, C/16] scales and a global scale that broadcasts to them -> values […, C]."""
    groups = E2M1_PAIRS[packed].reshape(*scale.shape, GROUP)
    values: Floats = groups * (E4M3[codes(scale)] * global_scale.astype(np.float32))[..., None]
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
