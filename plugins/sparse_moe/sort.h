// Sorts pairs of token and choice by expert, in three launches; the same order every time.
//
// A group of 32 tokens routes its tokens and counts its pairs for each expert (`route_group`); the counts become those
// of all groups before (`add_up`); then a pair's place is: all pairs of lower experts, those of its expert in groups
// before, those of its group's lower tokens (`place_group`). A token takes an expert once, so the last is the number of
// bits below the token's in the 32-bit set of tokens that took the expert. Atomics only count and set bits: their order
// does not matter.
#pragma once

#include "common/reduce.h"
#include "sparse_moe/grouped_plan.h"
#include "sparse_moe/router.h"

namespace flashnext::sparse_moe {

constexpr int kSortThreads = 512;
constexpr int kSortWarps = kSortThreads / kWarpSize;
static_assert(kMaxExperts <= kSortThreads, "place_group gives every expert a thread");
static_assert(kGroupTokens == 32, "the tokens of a group are the bits of a word");

// grid: (groups)
template <class T>
__global__ void __launch_bounds__(kSortThreads) route_group(SparseMoEParams p) {
  SHARED_ARRAY(Choice, choices, [kSortWarps]);
  SHARED_ARRAY(int, counts, [kMaxExperts]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int first = blockIdx.x * kGroupTokens, end = min(first + kGroupTokens, p.tokens);
  const GroupedWorkspace w = grouped_workspace(p);
  for (int e = threadIdx.x; e < p.experts; e += kSortThreads) counts[e] = 0;
  __syncthreads();
  Choice& choice = choices[warp];
  for (int token = first + warp; token < end; token += kSortWarps) {
    route<T>(p, token, choice);
    __syncwarp();
    if (lane < p.top_k) {
      store(&w.chosen[token * p.top_k + lane], choice.expert[lane]);
      store(&w.weights[token * p.top_k + lane], choice.weight[lane]);
      atomicAdd(&counts[choice.expert[lane]], 1);
    }
    __syncwarp();
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kSortThreads) store(&w.counts[blockIdx.x * p.experts + e], counts[e]);
}

// A warp's lanes have an expert each, its warps a segment of the groups each. grid: (experts / 32)
__global__ void __launch_bounds__(kSortThreads) add_up(SparseMoEParams p) {
  SHARED_ARRAY(int, sums, [kSortWarps][kWarpSize]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int expert = blockIdx.x * kWarpSize + lane, groups = group_count(p);
  const int segment = (groups + kSortWarps - 1) / kSortWarps;
  const int first = min(warp * segment, groups), end = expert < p.experts ? min(first + segment, groups) : first;
  const GroupedWorkspace w = grouped_workspace(p);
  int sum = 0;
  for (int g = first; g < end; g++) sum += load(&w.counts[g * p.experts + expert]);
  sums[warp][lane] = sum;
  __syncthreads();
  int before = 0;
  for (int other = 0; other < warp; other++) before += sums[other][lane];
  for (int g = first; g < end; g++) {
    int* const count = &w.counts[g * p.experts + expert];
    const int here = load(count);
    store(count, before);
    before += here;
  }
  if (warp == kSortWarps - 1 && expert < p.experts) store(&w.totals[expert], before);
}

// Sum of the values of lower threads; by all threads. `sums` is read until the next barrier.
__device__ __forceinline__ int sum_of_lower(int value, int* sums) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  int sum = value;
  for (int by = 1; by < kWarpSize; by *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == kWarpSize - 1) sums[warp] = sum;
  __syncthreads();
  for (int other = 0; other < warp; other++) sum += sums[other];
  return sum - value;
}

// grid: (groups)
__global__ void __launch_bounds__(kSortThreads) place_group(SparseMoEParams p) {
  SHARED_ARRAY(int, sums, [2][kSortWarps]);
  SHARED_ARRAY(int, starts, [kMaxExperts]);
  SHARED_ARRAY(unsigned, takers, [kMaxExperts]);
  allow_next_launch();
  wait_for_previous_launch();
  const GroupedWorkspace w = grouped_workspace(p);
  const int expert = threadIdx.x;
  const bool valid = expert < p.experts;
  const int total = valid ? load(&w.totals[expert]) : 0, tiles = (total + kRowTile - 1) / kRowTile;
  const int start = sum_of_lower(total, sums[0]), first_tile = sum_of_lower(tiles, sums[1]);
  if (valid) {
    starts[expert] = start + load(&w.counts[blockIdx.x * p.experts + expert]);
    takers[expert] = 0;
  }
  // The list of tiles is shared out: a group writes those of every so manieth expert.
  if (expert % gridDim.x == blockIdx.x) {
    for (int i = 0; i < tiles; i++) {
      int* const tile = &w.tiles[3 * (first_tile + i)];
      store(&tile[0], expert);
      store(&tile[1], start + i * kRowTile);
      store(&tile[2], min(total - i * kRowTile, kRowTile));
    }
  }
  if (blockIdx.x == 0 && expert == p.experts - 1) store(w.tile_count, first_tile + tiles);
  __syncthreads();
  const int first = blockIdx.x * kGroupTokens, end = min(first + kGroupTokens, p.tokens);
  for (int pair = first * p.top_k + threadIdx.x; pair < end * p.top_k; pair += kSortThreads) {
    atomicAdd(&takers[load(&w.chosen[pair])], 1u << (pair / p.top_k - first));
  }
  __syncthreads();
  for (int pair = first * p.top_k + threadIdx.x; pair < end * p.top_k; pair += kSortThreads) {
    const int chosen = load(&w.chosen[pair]), token = pair / p.top_k;
    const int place = starts[chosen] + __popc(takers[chosen] & ((1u << (token - first)) - 1));
    store(&w.places[pair], place);
    store(&w.rows[place], token);
  }
}

}  // namespace flashnext::sparse_moe
