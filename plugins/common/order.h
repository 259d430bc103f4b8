// Floats as unsigned integers of the same order, for `redux`, radix selection and sorting.
#pragma once

#include "common/platform.h"

namespace flashnext {

// 0 is below all of them. The sum makes -0 the 0 that it equals.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

}  // namespace flashnext
