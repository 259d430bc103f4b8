// Scores of the complete blocks for the queries of a long step, on tensor cores.
//
// A block of threads keeps its queries in shared memory and goes through the pooled keys, 128 at a time. Every warp
// takes 32 of them into registers, so that the next ones can arrive while it multiplies: all index heads of 16 queries
// by its keys, ReLU, sum over the heads. Keys are BF16 as they are stored; a query is a sum of two BF16 values, which
// is right to 2^-17: the choice of blocks is then that of a product in float, but for what its sums round.
#pragma once

#include "common/tensor_tile.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

constexpr int kScoreTileThreads = 128;
constexpr int kTileKeys = 128;
constexpr int kScoreGrid = 256;  // blocks of threads that are enough: two for each multiprocessor of a large GPU
constexpr int kWarpTileKeys = kTileKeys / (kScoreTileThreads / kWarpSize);
constexpr int kKeyPairs = kWarpTileKeys / kPair;
constexpr int kDepths = kMaxIndexDim / kMmaDepth;

using IndexTile = Tile<kMaxIndexDim>;

constexpr size_t kScoreTileShared = 2 * IndexTile::bytes(kScoreRows) + IndexTile::bytes(kTileKeys);

struct ScoreTiles {
  IndexTile high, low;  // [index_heads, score_queries]: the queries, and what is left of them
  IndexTile keys;
};

__device__ __forceinline__ void stage_tile_queries(const SparseAttentionParams& p, int row, int first, int count,
                                                   const ScoreTiles& tiles) {
  const int queries = score_queries(p), units = kMaxIndexDim / kChunk, past = load(&p.past_len[row]);
  for (int i = threadIdx.x; i < queries * p.index_heads * units; i += kScoreTileThreads) {
    const int place = i / units, head = place / queries, query = place % queries, column = i % units * kChunk;
    Chunk high{}, low{};
    const bool scored = query < count && (past + first + query + 1) / p.block > p.budget_blocks;
    if (scored && column < p.index_head_dim) {
      const size_t token = size_t(row) * p.steps + first + query;
      const float* from = workspace(p).index_query + (token * p.index_heads + head) * p.index_head_dim;
      high = load_chunk(reinterpret_cast<const Float32*>(from) + column);
      UNROLL
      for (int j = 0; j < kChunk; j++) {
        low.at[j] = high.at[j] - rounded<BFloat16>(high.at[j]);
      }
    }
    put_chunk(tiles.high, place, column, pack(BFloat16{}, high));
    put_chunk(tiles.low, place, column, pack(BFloat16{}, low));
  }
}

template <class T>
__device__ __forceinline__ void stage_keys(const SparseAttentionParams& p, int slot, int begin, int end,
                                           IndexTile keys) {
  const T* from = static_cast<const T*>(p.index_key_state) + size_t(slot) * p.index_blocks * p.index_head_dim;
  const auto row_at = [&](int i) { return begin + i < end ? from + size_t(begin + i) * p.index_head_dim : nullptr; };
  stage_rows<kScoreTileThreads>(keys, kTileKeys, p.index_head_dim, row_at);
  commit_copies();
}

// Adds the positive parts of one head's products with 16 queries.
__device__ __forceinline__ void add_head(float (&sums)[2 * kKeyPairs][4], IndexTile high, IndexTile low,
                                         const uint32_t (&keys)[kDepths][kKeyPairs][2][2]) {
  float products[2 * kKeyPairs][4] = {};
  UNROLL
  for (int depth = 0; depth < kDepths; depth++) {
    uint32_t a[2][4];
    load_a(a[0], high, depth * kMmaDepth);
    load_a(a[1], low, depth * kMmaDepth);
    UNROLL
    for (int part = 0; part < 2; part++) {
      UNROLL
      for (int n = 0; n < 2 * kKeyPairs; n++) mma_bf16(products[n], a[part], keys[depth][n / 2][n % 2], products[n]);
    }
  }
  UNROLL
  for (int n = 0; n < 2 * kKeyPairs; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) sums[n][i] += fmaxf(products[n][i], 0.0f);
  }
}

// To `rows` of 16 queries, of which `count` are there; the keys' blocks, from `first_block` on, end before `most`.
__device__ __forceinline__ void store_scores(const float (&sums)[2 * kKeyPairs][4], float scale, float* rows,
                                             size_t stride, int count, int first_block, int most) {
  UNROLL
  for (int n = 0; n < 2 * kKeyPairs; n++) {
    UNROLL
    for (int r = 0; r < 2; r++) {
      const int row = accumulator_row(2 * r), block = first_block + n * 8 + accumulator_column(0);
      if (row >= count || block >= most) continue;
      const float2 pair = make_float2(sums[n][2 * r] * scale, sums[n][2 * r + 1] * scale);
      store_pair(reinterpret_cast<Float32*>(rows + row * stride + block), pair);
    }
  }
}

// grid: (that share a query's keys, score_steps / score_queries, batch); for the steps from `first` on
template <class T>
__global__ void __launch_bounds__(kScoreTileThreads, 2) score_tile(SparseAttentionParams p, int first) {
  SHARED_MEMORY(BFloat16, memory);
  allow_next_launch();
  wait_for_previous_launch();
  const int row = blockIdx.z, queries = score_queries(p), offset = blockIdx.y * queries;
  const int left = min(score_steps(p) - offset, load(&p.new_len[row]) - first - offset), count = min(queries, left);
  if (count <= 0) return;
  const int most = complete_blocks(p, query_at(p, row, first + offset + count - 1));
  int begin = blockIdx.x * kTileKeys;
  if (most <= p.budget_blocks || begin >= most) return;
  const ScoreTiles tiles{{memory}, {memory + kScoreRows * kMaxIndexDim}, {memory + 2 * kScoreRows * kMaxIndexDim}};
  const int slot = load(&p.slots[row]);
  stage_keys<T>(p, slot, begin, most, tiles.keys);
  stage_tile_queries(p, row, first + offset, count, tiles);
  const float scale = rsqrtf(float(p.index_head_dim));
  const int warp_key = threadIdx.x / kWarpSize * kWarpTileKeys;
  float* const out = workspace(p).scores + (size_t(row) * score_steps(p) + offset) * score_stride(p);
  for (; begin < most; begin += gridDim.x * kTileKeys) {
    wait_for_copies<0>();
    __syncthreads();
    uint32_t keys[kDepths][kKeyPairs][2][2];
    UNROLL
    for (int depth = 0; depth < kDepths; depth++) {
      UNROLL
      for (int n = 0; n < kKeyPairs; n++) {
        load_b(keys[depth][n], tiles.keys.from_row(warp_key + n * kPair), depth * kMmaDepth);
      }
    }
    __syncthreads();
    const int next = begin + gridDim.x * kTileKeys;
    if (next < most) stage_keys<T>(p, slot, next, most, tiles.keys);
    for (int query = 0; query < count; query += kMmaRows) {
      float sums[2 * kKeyPairs][4] = {};
      for (int head = 0; head < p.index_heads; head++) {
        add_head(sums, tiles.high.from_row(head * queries + query), tiles.low.from_row(head * queries + query), keys);
      }
      float* const rows = out + query * score_stride(p);
      store_scores(sums, scale, rows, score_stride(p), count - query, begin + warp_key, most);
    }
  }
}

}  // namespace flashnext::sparse_attention
