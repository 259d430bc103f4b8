// Stored numbers to the output's: the same bits as numpy in any case.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <bit>
#include <cstdint>
#include <cstring>

#include "table.h"

namespace {

const float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t((bits >> 16 & 0x8000) | 0x7FC0);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// FP8 rows are looked up, code by code, in the 256 values that numpy made of the codes.
template <class T>
void look_up(const uint8_t* codes, T* out, int64_t count, const T* values) {
  for (int64_t i = 0; i < count; i++) out[i] = values[codes[i]];
}

#if defined(__x86_64__)
#define HAS_WIDE 1
const bool kWide = __builtin_cpu_supports("avx512bw");

// 32 codes at a time: two look-ups of 64 entries each for the codes without their sign, which is put back on top.
__attribute__((target("avx512bw,avx512f"))) void look_up_wide(const uint8_t* codes, uint16_t* out, int64_t count,
                                                              const uint16_t* values, bool around_caches) {
  const __m512i low_a = _mm512_loadu_si512(values), low_b = _mm512_loadu_si512(values + 32);
  const __m512i high_a = _mm512_loadu_si512(values + 64), high_b = _mm512_loadu_si512(values + 96);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m512i wide = _mm512_cvtepu8_epi16(packed);
    const __m512i low = _mm512_permutex2var_epi16(low_a, wide, low_b);
    const __m512i high = _mm512_permutex2var_epi16(high_a, wide, high_b);
    const __m512i value = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(wide, _mm512_set1_epi16(64)), low, high);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(128)), 8);
    const __m512i result = _mm512_or_si512(value, sign);
    if (around_caches) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), result);
    } else {
      _mm512_storeu_si512(out + i, result);
    }
  }
  look_up(codes + i, out + i, count - i, values);
}

__attribute__((target("avx512f"))) void copy_wide(const uint8_t* from, uint8_t* out, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_loadu_si512(from + i));
  }
}
#else
#define HAS_WIDE 0
constexpr bool kWide = false;
#endif

// Around the caches, `out` and `bytes` are multiples of a line (64 bytes).
void copy_row(const uint8_t* from, uint8_t* out, int64_t bytes, bool around_caches) {
#if defined(__x86_64__)
  if (around_caches && kWide) return copy_wide(from, out, bytes);
  if (around_caches) {
    for (int64_t i = 0; i < bytes; i += 16) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), part);
    }
    return;
  }
#endif
  (void)around_caches;
  std::memcpy(out, from, size_t(bytes));
}

void widen(const uint8_t* bf16, uint8_t* out, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint16_t half;
    std::memcpy(&half, bf16 + 2 * i, 2);  // rows in a file need not be aligned
    const uint32_t bits = uint32_t(half) << 16;
    std::memcpy(out + 4 * i, &bits, 4);
  }
}

void fp8_row(const uint8_t* codes, void* out, int64_t count, const NgramTable& t, bool around_caches) {
  if (t.output == kFloat32) {
    look_up(codes, static_cast<uint32_t*>(out), count, static_cast<const uint32_t*>(t.values));
    return;
  }
  const auto* values = static_cast<const uint16_t*>(t.values);
#if HAS_WIDE
  if (kWide) return look_up_wide(codes, static_cast<uint16_t*>(out), count, values, around_caches);
#endif
  (void)around_caches;
  look_up(codes, static_cast<uint16_t*>(out), count, values);
}

// Scales that are no scales are found here, since only the rows that are read can be checked.
template <class T, class Convert>
bool nvfp4_row(const NgramTable& t, const uint8_t* packed, const uint8_t* scales, T* out, Convert convert) {
  for (int64_t group = 0; group < t.columns / kGroup; group++) {
    if (scales[group] >= kNanCode) return false;
    const float scale = t.e4m3[scales[group]] * t.scale;
    for (int i = 0; i < kGroup / 2; i++) {
      const uint8_t pair = packed[group * (kGroup / 2) + i];
      out[group * kGroup + 2 * i] = convert(kE2m1[pair & 15] * scale);
      out[group * kGroup + 2 * i + 1] = convert(kE2m1[pair >> 4] * scale);
    }
  }
  return true;
}

}  // namespace
