// Storage formats and their conversion to and from float, bit for bit the same on a GPU and on the host.
//
// A format is a one-value struct, so that kernels are templates over formats and a wrong pointer does not compile. All
// arithmetic is float; a format only says how a value lies in memory.
//
// Rounding: to nearest, ties to even. e4m3 saturates at 448, as hardware conversion does ("satfinite"), where PyTorch
// gives NaN above 464; whoever scales values for it keeps them inside.
#pragma once

#include "common/platform.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#endif

namespace flashnext {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3, kInt32 = 4, kUInt8 = 5 };

struct Float32 {
  float bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};

__device__ __forceinline__ float to_float(Float32 x) { return x.bits; }
__device__ __forceinline__ float to_float(BFloat16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// Exponent bias 7, three bits of mantissa; 0x7F and 0xFF are NaN, there is no infinity.
__device__ __forceinline__ float to_float(Float8E4M3 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80) << 24, magnitude = x.bits & 0x7F;
#if defined(__CUDACC__)
  // Through half precision, whose hardware conversion is exact and handles subnormals.
  const __half_raw half = __nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3);
  (void)sign, (void)magnitude;
  return __half2float(__half(half));
#else
  if (magnitude == 0x7F) return __uint_as_float(sign | 0x7FC00000u);
  if (magnitude < 8) return __uint_as_float(sign | __float_as_uint(float(magnitude) * 0x1p-9f));
  return __uint_as_float(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
#endif
}

// Two E4M3 values, the first in the low byte: one conversion instruction.
__device__ __forceinline__ float2 two_to_float(uint16_t pair) {
#if defined(__CUDACC__)
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return __half22float2(__half2(halves));
#else
  return {to_float(Float8E4M3{uint8_t(pair)}), to_float(Float8E4M3{uint8_t(pair >> 8)})};
#endif
}

template <class T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ Float32 from_float<Float32>(float x) {
  return {x};
}

template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
#if defined(__CUDACC__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {uint16_t(0x7FFF)};
  return {uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16)};
#endif
}

// Two BF16 values in a word, the first in the low half.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
#if defined(__CUDACC__)
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
#else
  return from_float<BFloat16>(low).bits | uint32_t(from_float<BFloat16>(high).bits) << 16;
#endif
}

// Products of two such pairs, rounded.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                         *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
#else
  return bf16_pair(__uint_as_float(a << 16) * __uint_as_float(b << 16),
                   __uint_as_float(a & 0xFFFF0000u) * __uint_as_float(b & 0xFFFF0000u));
#endif
}

template <>
__device__ __forceinline__ Float8E4M3 from_float<Float8E4M3>(float x) {
#if defined(__CUDACC__)
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
#else
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  const uint8_t sign = uint8_t(bits >> 24 & 0x80);
  if (magnitude > 0x7F800000u) return {uint8_t(0x7F)};
  if (magnitude >= __float_as_uint(448.0f)) return {uint8_t(sign | 0x7E)};
  // Below the smallest normal number (2^-6) the step is 2^-9: adding 2^14 leaves exactly that step in the mantissa.
  if (magnitude < __float_as_uint(0x1p-6f)) {
    const float shifted = __uint_as_float(magnitude) + 0x1p14f;
    return {uint8_t(sign | (__float_as_uint(shifted) - __float_as_uint(0x1p14f)))};
  }
  const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1);
  return {uint8_t(sign | ((rounded >> 20) - ((127u - 7u) << 3)))};
#endif
}

}  // namespace flashnext
