"""Number formats against ml_dtypes, and dequantization against the definition, element by element."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashnext.export import number_formats as formats


def test_tables_hold_the_values_of_ml_dtypes() -> None:
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(formats.E2M1, nibbles)
    assert formats.E2M1_PAIRS[0x7A].tolist() == [-1.0, 6.0]  # the low nibble is the first element
    assert formats.E4M3[0x7E] == 448
    assert np.isnan(formats.E4M3[[0x7F, 0xFF]]).all()


@pytest.mark.parametrize("shape", [(3, 128, 256), (2, 1, 1), (2, 129, 200), (1, 300, 127)])
def test_block_fp8(shape: tuple[int, int, int]) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 0x7F, shape).astype(np.uint8)
    blocks = (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    scale = random.uniform(1e-4, 10, blocks).astype(ml_dtypes.bfloat16)
    got = formats.dequantize_fp8_block(codes.view(ml_dtypes.float8_e4m3fn), scale)
    assert got.dtype == np.float32
    for i, r, c in [(0, 0, 0), (shape[0] - 1, shape[1] - 1, shape[2] - 1), (0, shape[1] // 2, shape[2] - 1)]:
        assert got[i, r, c] == formats.E4M3[codes[i, r, c]] * np.float32(scale[i, r // 128, c // 128])


def test_nvfp4() -> None:
    random = np.random.default_rng(0)
    packed = random.integers(0, 256, (2, 5, 24)).astype(np.uint8)
    scale = random.integers(1, 0x7F, (2, 5, 3)).astype(np.uint8)
    global_scale = np.array([3e-5, 7.0], np.float32)
    got = formats.dequantize_nvfp4(packed, scale.view(ml_dtypes.float8_e4m3fn), global_scale[:, None, None])
    assert got.shape == (2, 5, 48)
    for i, r, c in [(0, 0, 0), (1, 4, 47), (1, 2, 17), (0, 3, 16)]:
        code = packed[i, r, c // 2] >> 4 if c % 2 else packed[i, r, c // 2] & 15
        assert got[i, r, c] == formats.E2M1[code] * (formats.E4M3[scale[i, r, c // 16]] * global_scale[i])
