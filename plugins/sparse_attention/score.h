// Scores of the complete blocks for a few queries: products in float. Nothing is done where all blocks fit the budget.
#pragma once

#include "common/reduce.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

constexpr int kScoreWarps = 8;
constexpr int kKeyLanes = kMaxIndexDim / kChunk;  // that share a key
constexpr int kWarpKeys = kWarpSize / kKeyLanes;
constexpr int kBlockKeys = 128;  // pooled keys that a block of threads scores

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
  const int steps = min(score_steps(p), load(&p.new_len[row]) - first);
  if (steps <= 0) return;
  const int most = complete_blocks(p, query_at(p, row, first + steps - 1));
  const int begin = blockIdx.x * kBlockKeys;
  if (most <= p.budget_blocks || begin >= most) return;
  stage_index_queries(p, row, first, steps, queries);
  __syncthreads();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int key_lane = lane % kKeyLanes, column = key_lane * kChunk;
  const size_t first_key = size_t(load(&p.slots[row])) * p.index_blocks;
  const T* keys = static_cast<const T*>(p.index_key_state) + first_key * p.index_head_dim;
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
      float* out = workspace(p).scores + (size_t(row) * score_steps(p) + step) * score_stride(p);
      if (key_lane == 0 && block < most) store(out + block, sum * scale);
    }
  }
}

}  // namespace flashnext::sparse_attention
