// The blocks that the queries of a tile see together, so that attention reads each of them once.
//
// A bit for every block of a window of the context is set by whoever chose it; counting the bits gives the blocks in
// ascending order, and their places in the list. A block's entry carries a mask of the queries that chose it. The list
// also has the unfinished blocks of the queries' tails, which no mask names: positions say who sees their tokens.
#pragma once

#include "common/reduce.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

constexpr int kUniteThreads = 256;
constexpr int kThreadWords = 16;
constexpr int kWords = kUniteThreads * kThreadWords;
constexpr int kWindowBlocks = kWords * 32;

struct UniteShared {
  unsigned seen[kWords];  // a bit per block of the window
  int before[kWords];     // bits that are set in earlier words
  int totals[kUniteThreads / kWarpSize];
};

// A tile's list in the workspace: how many, then the entries.
__device__ __forceinline__ int* united_blocks(const SparseAttentionParams& p, int row, int tile) {
  return workspace(p).united + (size_t(row) * tile_count(p) + tile) * (1 + tile_blocks(p));
}

// What is chosen: a list for each query. Given blocks are those of all queries: there is one list of them.
__device__ __forceinline__ const int* choices(const SparseAttentionParams& p, const QueryTile& tile) {
  if (p.blocks) return p.blocks + size_t(tile.row) * p.budget_blocks;
  return workspace(p).chosen + (size_t(tile.row) * p.steps + tile.first) * p.budget_blocks;
}

__device__ __forceinline__ void see_block(UniteShared& shared, int block, int begin) {
  if (block >= begin && block - begin < kWindowBlocks) atomicOr(&shared.seen[(block - begin) / 32], 1u << block % 32);
}

// `count`: in all lists together.
__device__ __forceinline__ void see_blocks(const SparseAttentionParams& p, const QueryTile& tile, const int* chosen,
                                           int count, int begin, UniteShared& shared) {
  for (int i = threadIdx.x; i < kWords; i += kUniteThreads) shared.seen[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kUniteThreads) see_block(shared, load(chosen + i), begin);
  if (!p.blocks && int(threadIdx.x) < tile.count) {
    const Query query = query_at(p, tile.row, tile.first + threadIdx.x);
    if ((query.position + 1) % p.block) see_block(shared, complete_blocks(p, query), begin);
  }
  __syncthreads();
}

// Bits before each word, and all of them.
__device__ __forceinline__ int count_blocks(UniteShared& shared) {
  const int first = threadIdx.x * kThreadWords, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int mine = 0;
  for (int i = 0; i < kThreadWords; i++) mine += __popc(shared.seen[first + i]);
  int through = mine;
  for (int by = 1; by < kWarpSize; by *= 2) {
    const int other = __shfl_up_sync(kAllLanes, through, by);
    if (lane >= by) through += other;
  }
  if (lane == kWarpSize - 1) shared.totals[warp] = through;
  __syncthreads();
  int before = through - mine, all = 0;
  for (int w = 0; w < kUniteThreads / kWarpSize; w++) {
    if (w < warp) before += shared.totals[w];
    all += shared.totals[w];
  }
  for (int i = 0; i < kThreadWords; i++) {
    shared.before[first + i] = before;
    before += __popc(shared.seen[first + i]);
  }
  __syncthreads();
  return all;
}

// grid: (tiles, batch)
__global__ void __launch_bounds__(kUniteThreads, 1) unite(SparseAttentionParams p) {
  SHARED_ARRAY(UniteShared, shared_memory_of_block, [1]);
  UniteShared& shared = *shared_memory_of_block;
  allow_next_launch();
  wait_for_previous_launch();
  const QueryTile tile = query_tile(p, blockIdx.y, blockIdx.x);
  if (tile.count == 0 || is_dense(p, tile)) return;
  const int lists = p.blocks ? 1 : tile.count;
  const int* const chosen = choices(p, tile);
  const int last = load(&p.past_len[tile.row]) + tile.first + tile.count - 1;
  int* const out = united_blocks(p, tile.row, blockIdx.x);
  int* entries = out + 1;
  int listed = 0;
  for (int begin = 0; begin <= last / p.block; begin += kWindowBlocks) {
    see_blocks(p, tile, chosen, lists * p.budget_blocks, begin, shared);
    const int found = count_blocks(shared);
    for (int i = threadIdx.x; i < kWords; i += kUniteThreads) {
      int place = shared.before[i];
      for (unsigned bits = shared.seen[i]; bits; bits &= bits - 1) {
        store(entries + place++, begin + i * 32 + __ffs(int(bits)) - 1);
      }
    }
    for (int list = 0; list < lists; list++) {
      __syncthreads();
      const unsigned mask = p.blocks ? (1u << kMaxTileQueries) - 1 : 1u << list;
      for (int i = threadIdx.x; i < p.budget_blocks; i += kUniteThreads) {
        const int block = load(chosen + list * p.budget_blocks + i), offset = block - begin;
        if (offset < 0 || offset >= kWindowBlocks) continue;
        const unsigned below = shared.seen[offset / 32] & ((1u << offset % 32) - 1);
        int* const entry = entries + shared.before[offset / 32] + __popc(below);
        store(entry, int(unsigned(load(entry)) | mask << kBlockBits));
      }
    }
    __syncthreads();
    entries += found;
    listed += found;
  }
  if (threadIdx.x == 0) store(out, listed);
}

}  // namespace flashnext::sparse_attention
