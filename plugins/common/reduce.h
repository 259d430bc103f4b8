// Sums over a warp and over a block, always in the same order: the same input gives the same bits.
#pragma once

#include "common/platform.h"

namespace flashnext {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Butterfly over `width` neighbouring lanes (a power of two); every lane gets the sum.
__device__ __forceinline__ float warp_sum(float value, int width = kWarpSize) {
  for (int by = width / 2; by > 0; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

__device__ __forceinline__ float warp_max(float value, int width = kWarpSize) {
  for (int by = width / 2; by > 0; by /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, by));
  return value;
}

// Sums N values over the block at once; every thread gets all sums. `parts` holds N floats per warp, and nobody may still
// be reading it. One barrier: use two arrays in turn for calls that follow each other.
template <int N>
__device__ __forceinline__ void block_sum(float (&values)[N], float* parts) {
  const int warp = threadIdx.x / kWarpSize, warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  UNROLL
  for (int i = 0; i < N; i++) values[i] = warp_sum(values[i]);
  if (threadIdx.x % kWarpSize == 0) {
    UNROLL
    for (int i = 0; i < N; i++) parts[warp * N + i] = values[i];
  }
  __syncthreads();
  UNROLL
  for (int i = 0; i < N; i++) {
    values[i] = 0.0f;
    for (int w = 0; w < warps; w++) values[i] += parts[w * N + i];
  }
}

// The largest over the block; every thread gets it. `parts` and the barrier as for block_sum. A NaN is passed over.
__device__ __forceinline__ float block_max(float value, float* parts) {
  const int warp = threadIdx.x / kWarpSize, warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  value = warp_max(value);
  if (threadIdx.x % kWarpSize == 0) parts[warp] = value;
  __syncthreads();
  for (int w = 0; w < warps; w++) value = fmaxf(value, parts[w]);
  return value;
}

}  // namespace flashnext
