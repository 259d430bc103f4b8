// Softmax attention of a long step's queries on tensor cores, with their norms and RoPE before it and the output gate
// after it.
//
// A block of threads takes one key head and a tile of neighbouring queries: a row for each of their heads that share it
// (five queries of twelve heads at the official sizes), 16 rows for each of four warps. It goes through the tokens that
// any of the queries sees, 64 at a time, gathered into shared memory; so neighbours that choose the same blocks share
// their reads. Where all complete blocks fit the budget, these are simply all tokens up to the last query's.
//
// Keys of the next 64 tokens arrive while weights are made and values summed; values while scores are computed.
#pragma once

#include "common/math.h"
#include "sparse_attention/queries.h"
#include "sparse_attention/token_tiles.h"
#include "sparse_attention/unite.h"

namespace flashnext::sparse_attention {

constexpr int kTokenProducts = kTileTokens / 8;
constexpr int kHeadProducts = kMaxHeadDim / 8;
constexpr int kOfRow = 2;  // rows of a tile that a thread has a part of

template <class C>
struct AttendTileShared {
  BFloat16 query[kTileRows * kMaxHeadDim];  // at the end the gates, then the results
  TokenRows<C> key;
  TokenRows<C> value;  // first, floats of the query heads that are being prepared
  BFloat16 unpacked[TokenRows<C>::kUnpacked];
  TokenRound rounds[2];
};

// The tokens that a tile goes through, numbered: those of the listed blocks, then all from `tail` on.
struct TileTokens {
  QueryTile tile;
  const int* entries;  // of the listed blocks
  int listed, tail, count;
  int past;
  bool dense;
};

__device__ __forceinline__ TileTokens tile_tokens(const SparseAttentionParams& p, const QueryTile& tile, int number) {
  TileTokens tokens{tile, nullptr, 0, 0, 0, load(&p.past_len[tile.row]), is_dense(p, tile)};
  const int end = tokens.past + tile.first + tile.count;
  if (!tokens.dense) {
    const int* list = united_blocks(p, tile.row, number);
    tokens.entries = list + 1;
    tokens.listed = load(list) * p.block;
    tokens.tail = p.blocks ? load(&p.blocks_len[tile.row]) / p.block * p.block : end;
  }
  tokens.count = tokens.listed + max(0, end - tokens.tail);
  return tokens;
}

// By the first 64 threads.
__device__ __forceinline__ void find_tokens(const SparseAttentionParams& p, const TileTokens& tokens, int begin,
                                            TokenRound& round) {
  const int number = begin + threadIdx.x;
  if (threadIdx.x >= kTileTokens) return;
  int position = tokens.tail + number - tokens.listed;
  unsigned chosen = 0, seen = 0;
  if (number < tokens.listed) {
    const unsigned entry = unsigned(load(tokens.entries + number / p.block));
    position = int(entry & ((1u << kBlockBits) - 1)) * p.block + number % p.block;
    chosen = entry >> kBlockBits;
  }
  for (int i = 0; i < tokens.tile.count && number < tokens.count; i++) {
    const int last = tokens.past + tokens.tile.first + i;
    const int tail = tokens.dense || p.blocks ? tokens.tail : (last + 1) / p.block * p.block;
    if (position <= last && (chosen >> i & 1 || position >= tail)) seen |= 1u << i;
  }
  round.position[threadIdx.x] = seen ? position : -1;  // what nobody sees may hold anything
  round.seen[threadIdx.x] = seen;
}

// The query and the head of a row.
struct TileRow {
  int query, step, head;
  bool valid;
};

__device__ __forceinline__ TileRow tile_row(const SparseAttentionParams& p, const QueryTile& tile, int kv_head,
                                            int row) {
  const int group = p.heads / p.kv_heads, query = row / group;
  return {query, tile.first + query, kv_head * group + row % group, query < tile.count};
}

// Normalised and rotated rows of this warp, zeros beyond the valid queries.
template <class T>
__device__ __forceinline__ void prepare_rows(const SparseAttentionParams& p, const TileTokens& tokens, int kv_head,
                                             HeadTile queries, float* buffer) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kMmaRows;
  for (int row = first_row; row < first_row + kMmaRows; row++) {
    const TileRow at = tile_row(p, tokens.tile, kv_head, row);
    if (at.valid) {
      const size_t token = size_t(tokens.tile.row) * p.steps + at.step;
      prepare_query<T>(p, token, tokens.past + at.step, at.head, buffer);
    }
    for (int i = lane; i < kMaxHeadDim; i += kWarpSize) {
      *queries.at(row, i) = from_float<BFloat16>(at.valid && i < p.head_dim ? buffer[i] : 0.0f);
    }
    __syncwarp();
  }
}

// What a thread knows of its two rows: weights are relative to the largest score so far, in powers of two.
struct RunningSoftmax {
  float largest[kOfRow], sum[kOfRow];
};

// Scores become weights; returns by how much earlier sums shrink.
__device__ __forceinline__ void weigh(float (&scores)[kTokenProducts][4], const int (&query)[kOfRow],
                                      const TokenRound& round, float scale, RunningSoftmax& running,
                                      float (&decay)[kOfRow]) {
  float largest[kOfRow] = {-INFINITY, -INFINITY};
  UNROLL
  for (int n = 0; n < kTokenProducts; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      const unsigned seen = round.seen[n * 8 + accumulator_column(i)];
      scores[n][i] = seen >> query[i / 2] & 1 ? scores[n][i] * scale : -INFINITY;
      largest[i / 2] = fmaxf(largest[i / 2], scores[n][i]);
    }
  }
  float base[kOfRow];
  UNROLL
  for (int r = 0; r < kOfRow; r++) {
    const float most = fmaxf(running.largest[r], warp_max(largest[r], 4));
    base[r] = most == -INFINITY ? 0.0f : most;
    decay[r] = exp2f(running.largest[r] - base[r]);
    running.largest[r] = most;
    running.sum[r] *= decay[r];
  }
  UNROLL
  for (int n = 0; n < kTokenProducts; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      scores[n][i] = exp2f(scores[n][i] - base[i / 2]);
      running.sum[i / 2] += scores[n][i];
    }
  }
}

__device__ __forceinline__ void multiply_keys(const SparseAttentionParams& p, HeadTile queries, HeadTile keys,
                                              float (&scores)[kTokenProducts][4]) {
  UNROLL
  for (int column = 0; column < kMaxHeadDim; column += kMmaDepth) {
    if (column >= p.head_dim) break;
    uint32_t a[4];
    load_a(a, queries, column);
    UNROLL
    for (int n = 0; n < kTokenProducts / 2; n++) {
      uint32_t b[2][2];
      load_b(b, keys.from_row(n * kPair), column);
      mma_bf16(scores[2 * n], a, b[0], scores[2 * n]);
      mma_bf16(scores[2 * n + 1], a, b[1], scores[2 * n + 1]);
    }
  }
}

__device__ __forceinline__ void add_weighted(const SparseAttentionParams& p, const float (&weights)[kTokenProducts][4],
                                             HeadTile values, const float (&decay)[kOfRow],
                                             float (&sums)[kHeadProducts][4]) {
  uint32_t a[kTokenProducts / 2][4];
  UNROLL
  for (int k = 0; k < kTokenProducts / 2; k++) accumulators_as_a(a[k], weights[2 * k], weights[2 * k + 1]);
  UNROLL
  for (int n = 0; n < kHeadProducts / 2; n++) {
    if (n * kPair >= p.head_dim) break;
    UNROLL
    for (int i = 0; i < 4; i++) {
      sums[2 * n][i] *= decay[i / 2];
      sums[2 * n + 1][i] *= decay[i / 2];
    }
    UNROLL
    for (int k = 0; k < kTokenProducts / 2; k++) {
      uint32_t b[2][2];
      load_b_transposed(b, values, k * kMmaDepth, n * kPair);
      mma_bf16(sums[2 * n], a[k], b[0], sums[2 * n]);
      mma_bf16(sums[2 * n + 1], a[k], b[1], sums[2 * n + 1]);
    }
  }
}

// The warp's means (times `scale`) times the gates, to y; through its own rows of the queries' tile, for 16-byte
// accesses of global memory.
template <class T>
__device__ __forceinline__ void store_rows(const SparseAttentionParams& p, const QueryTile& tile, int kv_head,
                                           HeadTile rows, const float (&sums)[kHeadProducts][4],
                                           const RunningSoftmax& running, float scale) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kMmaRows;
  const int column = lane * kChunk;
  __syncwarp();
  for (int row = 0; row < kMmaRows; row++) {
    const TileRow at = tile_row(p, tile, kv_head, first_row + row);
    const size_t place = (size_t(tile.row) * p.steps + at.step) * p.heads + at.head;
    if (!at.valid || column >= p.head_dim) continue;
    put_chunk(rows, row, column, load_packed(static_cast<const T*>(p.q_gate) + (2 * place + 1) * p.head_dim + column));
  }
  __syncwarp();
  UNROLL
  for (int r = 0; r < kOfRow; r++) {
    const float sum = warp_sum(running.sum[r], 4), factor = sum > 0.0f ? __fdividef(scale, sum) : 0.0f;
    UNROLL
    for (int n = 0; n < kHeadProducts; n++) {
      if (n * 8 >= p.head_dim) break;
      const int at = n * 8 + accumulator_column(0), row = accumulator_row(2 * r);
      const float2 gate = get_pair(rows, row, at);
      put_pair(rows, row, at, sums[n][2 * r] * factor * sigmoid(gate.x), sums[n][2 * r + 1] * factor * sigmoid(gate.y));
    }
  }
  __syncwarp();
  const int tile_end = tile.first + tile_queries(p);
  for (int row = 0; row < kMmaRows; row++) {
    const TileRow at = tile_row(p, tile, kv_head, first_row + row);
    if (at.step >= min(tile_end, p.steps) || column >= p.head_dim) continue;
    const size_t place = (size_t(tile.row) * p.steps + at.step) * p.heads + at.head;
    Packed<T> result{};
    if (at.valid) result = *reinterpret_cast<const Packed<T>*>(rows.at(row, column));
    store_packed(static_cast<T*>(p.y) + place * p.head_dim + column, result);
  }
}

// grid: (tiles, kv_heads, batch)
template <class T, class C>
__global__ void __launch_bounds__(kTileThreads, 2) attend_tile(SparseAttentionParams p) {
  SHARED_MEMORY(AttendTileShared<C>, shared);
  allow_next_launch();
  wait_for_previous_launch();
  // The last queries see the most tokens: they start first.
  const int number = gridDim.x - 1 - blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const QueryTile tile = query_tile(p, row, number);
  const HeadTile queries{shared->query}, unpacked{shared->unpacked};
  const HeadTile mine = queries.from_row(threadIdx.x / kWarpSize * kMmaRows);
  float sums[kHeadProducts][4] = {};
  RunningSoftmax running{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  if (tile.count == 0) return store_rows<T>(p, tile, kv_head, mine, sums, running, 0.0f);
  const TileTokens tokens = tile_tokens(p, tile, number);
  const int slot = load(&p.slots[row]), group = p.heads / p.kv_heads;
  find_tokens(p, tokens, 0, shared->rounds[0]);
  __syncthreads();
  shared->key.stage(p, p.key_state, slot, kv_head, shared->rounds[0]);
  commit_copies();
  float* const buffers = reinterpret_cast<float*>(&shared->value);
  prepare_rows<T>(p, tokens, kv_head, queries, buffers + threadIdx.x / kWarpSize * kMaxHeadDim);
  __syncthreads();
  const int first_row = threadIdx.x / kWarpSize * kMmaRows;
  // Rows beyond the queries look at a bit that nobody sets.
  const auto query_of = [&](int i) { return min((first_row + accumulator_row(i)) / group, kMaxTileQueries); };
  const int query[kOfRow] = {query_of(0), query_of(2)};
  const float scale = rsqrtf(float(p.head_dim)) * 1.44269504f * cache_scale<C>(p.k_scale);  // log2(e)
  for (int begin = 0, i = 0; begin < tokens.count; begin += kTileTokens, i ^= 1) {
    shared->value.stage(p, p.value_state, slot, kv_head, shared->rounds[i]);
    commit_copies();
    wait_for_copies<1>();
    __syncthreads();
    float scores[kTokenProducts][4] = {};
    multiply_keys(p, mine, shared->key.tile(p.head_dim, unpacked), scores);
    find_tokens(p, tokens, begin + kTileTokens, shared->rounds[i ^ 1]);
    __syncthreads();
    if (begin + kTileTokens < tokens.count) {
      shared->key.stage(p, p.key_state, slot, kv_head, shared->rounds[i ^ 1]);
    }
    commit_copies();
    float decay[kOfRow];
    weigh(scores, query, shared->rounds[i], scale, running, decay);
    wait_for_copies<1>();
    __syncthreads();
    add_weighted(p, scores, shared->value.tile(p.head_dim, unpacked), decay, sums);
    __syncthreads();
  }
  store_rows<T>(p, tile, kv_head, mine, sums, running, cache_scale<C>(p.v_scale));
}

}  // namespace flashnext::sparse_attention
