// Scores of the complete blocks, and the choice among them. Both do nothing where all complete blocks fit the budget.
#pragma once

#include "common/order.h"
#include "common/select.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

constexpr int kScoreWarps = 8;
constexpr int kKeyLanes = kMaxIndexDim / kChunk;  // that share a key
constexpr int kWarpKeys = kWarpSize / kKeyLanes;
constexpr int kBlockKeys = 128;  // pooled keys that a block of threads scores

__device__ __forceinline__ int complete_blocks(const SparseAttentionParams& p, const Query& query) {
  return (query.position + 1) / p.block;
}

// The tile's index queries of one sequence, to shared memory [kStepTile][index_heads * index_head_dim].
__device__ __forceinline__ void stage_index_queries(const SparseAttentionParams& p, int row, int first, int count,
                                                    float* staged) {
  const int columns = p.index_heads * p.index_head_dim;
  const float* from = workspace(p).index_query + (size_t(row) * p.steps + first) * columns;
  for (int i = threadIdx.x; i < count * columns; i += blockDim.x) staged[i] = load(from + i);
}

// grid: (index_blocks / kBlockKeys, batch)
template <class T>
__global__ void __launch_bounds__(kScoreWarps * kWarpSize) score(SparseAttentionParams p, int first) {
  SHARED_MEMORY(float, queries);
  allow_next_launch();
  wait_for_previous_launch();
  const int row = blockIdx.y, columns = p.index_heads * p.index_head_dim;
  const int steps = min(min(kStepTile, p.steps - first), load(&p.new_len[row]) - first);
  if (steps <= 0) return;
  const int most = complete_blocks(p, query_at(p, row, first + steps - 1));
  const int begin = blockIdx.x * kBlockKeys;
  if (most <= p.budget_blocks || begin >= most) return;
  stage_index_queries(p, row, first, steps, queries);
  __syncthreads();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int key_lane = lane % kKeyLanes, column = key_lane * kChunk;
  const T* keys = static_cast<const T*>(p.index_key_state) + size_t(load(&p.slots[row])) * p.index_blocks * p.index_head_dim;
  const float scale = rsqrtf(float(p.index_head_dim));
  for (int i = warp * kWarpKeys + lane / kKeyLanes; i < kBlockKeys; i += kScoreWarps * kWarpKeys) {
    const int block = begin + i;
    Chunk key{};
    if (block < most && column < p.index_head_dim) key = load_chunk(keys + size_t(block) * p.index_head_dim + column);
    for (int step = 0; step < steps; step++) {
      float sum = 0.0f;
      for (int head = 0; head < p.index_heads; head++) {
        float product = 0.0f;
        const float* query = queries + step * columns + head * p.index_head_dim + column;
        UNROLL
        for (int j = 0; j < kChunk; j++) product += column < p.index_head_dim ? key.at[j] * query[j] : 0.0f;
        sum += fmaxf(warp_sum(product, kKeyLanes), 0.0f);
      }
      float* out = workspace(p).scores + (size_t(row) * kStepTile + step) * p.index_blocks;
      if (key_lane == 0 && block < most) store(out + block, sum * scale);
    }
  }
}

// grid: (kStepTile, batch)
__global__ void __launch_bounds__(kSelectThreads) choose(SparseAttentionParams p, int first) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const Query query = query_at(p, blockIdx.y, first + blockIdx.x);
  const int count = load(&p.new_len[query.row]);
  // Rows without tokens return no blocks.
  const bool empty = p.blocks_out && count == 0 && query.step == 0;
  if (!query.valid && !empty) return;
  const size_t place = tile_place(query, first);
  int* chosen = workspace(p).chosen + place * p.budget_blocks;
  const int complete = empty ? 0 : complete_blocks(p, query);
  if (complete > p.budget_blocks) {
    const float* scores = workspace(p).scores + place * p.index_blocks;
    const auto key = [&](int i) { return ordered(load(scores + i)); };
    const auto take = [&](int at, int i) { store(chosen + at, i); };
    select_largest(key, complete, p.budget_blocks, take, *shared);
  } else {
    for (int i = threadIdx.x; i < p.budget_blocks; i += blockDim.x) store(chosen + i, i < complete ? i : -1);
  }
  if (!p.blocks_out || (!empty && query.step != count - 1)) return;
  __syncthreads();
  int* out = p.blocks_out + size_t(query.row) * p.budget_blocks;
  for (int i = threadIdx.x; i < p.budget_blocks; i += blockDim.x) store(out + i, load(chosen + i));
}

}  // namespace flashnext::sparse_attention
