// The K largest of many keys, exactly and always the same ones: ties go to the lower index.
//
// A key is an unsigned integer (common/order.h makes one of a float). Four passes of eight bits find the K-th largest value and how many
// equal to it are still wanted; one more pass, in index order, writes the indices. Only integers are counted with atomics,
// so no order of threads can change the result.
#pragma once

#include "common/memory.h"
#include "common/reduce.h"

namespace flashnext {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kDigits = 256;

struct SelectShared {
  unsigned histogram[kDigits];
  unsigned prefix;       // digits of the K-th largest that are known
  unsigned wanted;       // how many are wanted among those with this prefix
  unsigned totals[2][kSelectWarps];
};

// Many keys are alike (scores that are exactly 0): lanes with the first lane's digit count as one.
__device__ __forceinline__ void count_digit(SelectShared& shared, bool valid, unsigned digit) {
  const unsigned first = __shfl_sync(kAllLanes, digit, 0);
  const unsigned same = __ballot_sync(kAllLanes, valid && digit == first);
  if (threadIdx.x % kWarpSize == 0 && same) atomicAdd(&shared.histogram[first], unsigned(__popc(same)));
  if (valid && digit != first) atomicAdd(&shared.histogram[digit], 1u);
}

// By one warp: the digit of the wanted-th largest, counted from the top; a lane has eight digits.
__device__ __forceinline__ void choose_digit(SelectShared& shared, int shift) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned* mine = shared.histogram + (kWarpSize - 1 - lane) * 8;  // lane 0 has the highest digits
  unsigned sum = 0;
  for (int i = 0; i < 8; i++) sum += mine[i];
  unsigned before = sum;
  for (int by = 1; by < kWarpSize; by *= 2) {
    const unsigned other = __shfl_up_sync(kAllLanes, before, by);
    if (lane >= by) before += other;
  }
  before -= sum;
  const unsigned wanted = shared.wanted;
  __syncwarp();
  if (before < wanted && wanted <= before + sum) {
    int i = 7;
    while (before + mine[i] < wanted) before += mine[i--];
    shared.prefix |= unsigned((kWarpSize - 1 - lane) * 8 + i) << shift;
    shared.wanted = wanted - before;
  }
}

// The `wanted` largest of `count` (more than wanted) keys: `take(place, i)` for each, places in the order of i. For the
// whole block.
template <class Keys, class Take>
__device__ __forceinline__ void select_largest(Keys key_of, int count, int wanted, Take take, SelectShared& shared) {
  const int padded = (count + kSelectThreads - 1) / kSelectThreads * kSelectThreads;
  if (threadIdx.x == 0) {
    shared.prefix = 0;
    shared.wanted = unsigned(wanted);
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kSelectThreads) shared.histogram[i] = 0;
    __syncthreads();
    const unsigned prefix = shared.prefix;
    for (int i = threadIdx.x; i < padded; i += kSelectThreads) {
      const unsigned key = i < count ? key_of(i) : 0;
      const bool valid = i < count && (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8));
      count_digit(shared, valid, key >> shift & (kDigits - 1));
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) choose_digit(shared, shift);
    __syncthreads();
  }
  const unsigned threshold = shared.prefix, equals = shared.wanted;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned below = (1u << lane) - 1;
  unsigned larger_before = 0, equal_before = 0;
  for (int i = threadIdx.x; i < padded; i += kSelectThreads) {
    const unsigned key = i < count ? key_of(i) : 0;
    const unsigned larger = __ballot_sync(kAllLanes, i < count && key > threshold);
    const unsigned equal = __ballot_sync(kAllLanes, i < count && key == threshold);
    if (lane == 0) {
      shared.totals[0][warp] = unsigned(__popc(larger));
      shared.totals[1][warp] = unsigned(__popc(equal));
    }
    __syncthreads();
    unsigned larger_here = larger_before, equal_here = equal_before;
    for (int w = 0; w < kSelectWarps; w++) {
      if (w < warp) larger_here += shared.totals[0][w];
      if (w < warp) equal_here += shared.totals[1][w];
      larger_before += shared.totals[0][w];
      equal_before += shared.totals[1][w];
    }
    larger_here += unsigned(__popc(larger & below));
    equal_here += unsigned(__popc(equal & below));
    const bool taken = larger >> lane & 1 || (equal >> lane & 1 && equal_here < equals);
    // Ascending places: all larger ones and the wanted equal ones with a lower index come before.
    if (taken) take(int(larger_here + min(equal_here, equals)), i);
    __syncthreads();
  }
}

}  // namespace flashnext
