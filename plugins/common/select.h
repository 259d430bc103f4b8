// The K largest of many keys, exactly and always the same ones: ties go to the lower index.
//
// A key is an unsigned integer (common/order.h makes one of a float). Four passes of eight bits find the K-th largest
// value and how many equal to it are still wanted; two more, each warp over a part of its own, count and write the
// indices in order. Only integers are counted with atomics, so no order of threads can change the result.
#pragma once

#include "common/memory.h"
#include "common/reduce.h"

namespace flashnext {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / kWarpSize;
constexpr int kDigits = 256;
constexpr int kSelectAtOnce = 4;  // keys of a thread that are read together

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

// Histogram of the digit at `shift` among the keys that begin like `prefix`; a thread reads several keys at once.
template <class Keys>
__device__ __forceinline__ void count_digits(Keys key_of, int count, int shift, unsigned prefix, SelectShared& shared) {
  for (int start = threadIdx.x; start - int(threadIdx.x) < count; start += kSelectAtOnce * kSelectThreads) {
    unsigned keys[kSelectAtOnce];
    UNROLL
    for (int j = 0; j < kSelectAtOnce; j++) {
      const int i = start + j * kSelectThreads;
      keys[j] = i < count ? key_of(i) : 0;
    }
    UNROLL
    for (int j = 0; j < kSelectAtOnce; j++) {
      const bool same = shift == 24 || keys[j] >> (shift + 8) == prefix >> (shift + 8);
      count_digit(shared, same && start + j * kSelectThreads < count, keys[j] >> shift & (kDigits - 1));
    }
  }
}

// Calls `visit(i, larger, equal)` for the warp's part of the keys, where the votes say which lanes' keys are above and
// at the threshold. Warps have parts of equal length, in the order of i.
template <class Keys, class Visit>
__device__ __forceinline__ void compare_keys(Keys key_of, int count, unsigned threshold, Visit visit) {
  const int lane = threadIdx.x % kWarpSize, length = (count + kSelectThreads - 1) / kSelectThreads * kWarpSize;
  const int begin = threadIdx.x / kWarpSize * length, end = min(begin + length, count);
  for (int start = begin; start < end; start += kWarpSize) {
    const int i = start + lane;
    const unsigned key = i < end ? key_of(i) : 0;
    const unsigned larger = __ballot_sync(kAllLanes, i < end && key > threshold);
    visit(i, larger, __ballot_sync(kAllLanes, i < end && key == threshold));
  }
}

// The `wanted` largest of `count` (more than wanted) keys: `take(place, i)` for each, places in the order of i. For the
// whole block; a barrier before anyone reads what others took is the caller's.
template <class Keys, class Take>
__device__ __forceinline__ void select_largest(Keys key_of, int count, int wanted, Take take, SelectShared& shared) {
  if (threadIdx.x == 0) {
    shared.prefix = 0;
    shared.wanted = unsigned(wanted);
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kSelectThreads) shared.histogram[i] = 0;
    __syncthreads();
    count_digits(key_of, count, shift, shared.prefix, shared);
    __syncthreads();
    if (threadIdx.x < kWarpSize) choose_digit(shared, shift);
    __syncthreads();
  }
  const unsigned threshold = shared.prefix, equals = shared.wanted;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  unsigned larger_here = 0, equal_here = 0;
  compare_keys(key_of, count, threshold, [&](int, unsigned larger, unsigned equal) {
    larger_here += unsigned(__popc(larger));
    equal_here += unsigned(__popc(equal));
  });
  if (lane == 0) {
    shared.totals[0][warp] = larger_here;
    shared.totals[1][warp] = equal_here;
  }
  __syncthreads();
  larger_here = equal_here = 0;
  for (int w = 0; w < warp; w++) {
    larger_here += shared.totals[0][w];
    equal_here += shared.totals[1][w];
  }
  const unsigned below = (1u << lane) - 1;
  compare_keys(key_of, count, threshold, [&](int i, unsigned larger, unsigned equal) {
    const unsigned larger_before = larger_here + unsigned(__popc(larger & below));
    const unsigned equal_before = equal_here + unsigned(__popc(equal & below));
    const bool taken = larger >> lane & 1 || (equal >> lane & 1 && equal_before < equals);
    // Ascending places: all larger ones and the wanted equal ones with a lower index come before.
    if (taken) take(int(larger_before + min(equal_before, equals)), i);
    larger_here += unsigned(__popc(larger));
    equal_here += unsigned(__popc(equal));
  });
}

}  // namespace flashnext
