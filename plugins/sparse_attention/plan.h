// Limits, the workspace, and what a step's rows mean; shared by the kernels of SparseAttention.
#pragma once

#include <type_traits>

#include "common/memory.h"
#include "sparse_attention/params.h"

namespace flashnext::sparse_attention {

constexpr int kStepTile = 8;       // tokens of each sequence that are worked on at a time without tensor cores
constexpr int kSplitTokens = 64;   // that a block of threads attends to at a time
constexpr int kMaxHeadDim = 256;
constexpr int kMaxIndexDim = 128;
constexpr int kMaxIndexHeads = 8;
constexpr int kMaxGroup = 16;      // query heads that share a key head
constexpr int kPartBlocks = 8192;  // index blocks among which a block of threads chooses

// --- long steps on tensor cores ---------------------------------------------------------------------

constexpr int kTileRows = 64;       // pairs of a query and a head that share a key head and their tokens
constexpr int kMaxTileQueries = 8;  // bits of a mask beside a block's number
constexpr int kBlockBits = 24;      // of a block's number
constexpr int kScoreRows = 128;     // pairs of a query and an index head that are scored together
// Of scores at a time, unless the caller says otherwise: 1,024 steps in a cache of 262,144 tokens, 256 in one of a million.
constexpr int64_t kScoreBytes = 260 << 20;

__device__ __host__ inline bool on_tensor_cores(const SparseAttentionParams& p) {
  return p.T == kBFloat16 && p.steps > kStepTile;
}

// Queries whose heads fill a tile of attention.
__device__ __host__ inline int tile_queries(const SparseAttentionParams& p) {
  const int fitting = kTileRows / (p.heads / p.kv_heads);
  return fitting < kMaxTileQueries ? fitting : kMaxTileQueries;
}
__device__ __host__ inline int tile_count(const SparseAttentionParams& p) {
  return (p.steps + tile_queries(p) - 1) / tile_queries(p);
}
// Blocks that any of a tile's queries may see: their choices, and those of their tails.
__device__ __host__ inline int tile_blocks(const SparseAttentionParams& p) {
  return tile_queries(p) * (p.budget_blocks + 1);
}

// Queries that are scored together: a multiple of 16.
__device__ __host__ inline int score_queries(const SparseAttentionParams& p) {
  return kScoreRows / p.index_heads / 16 * 16;
}

// Steps of each sequence that are scored at a time, before their blocks are chosen: what fits the bytes, and at least
// those that are scored together.
__device__ __host__ inline int score_steps(const SparseAttentionParams& p) {
  if (!on_tensor_cores(p) || p.blocks) return p.steps < kStepTile ? p.steps : kStepTile;
  const int64_t bytes = p.score_bytes ? p.score_bytes : kScoreBytes, together = score_queries(p);
  const int64_t fitting = bytes / (int64_t(p.batch) * p.index_blocks * int64_t(sizeof(float))) / together * together;
  const int64_t steps = fitting < together ? together : fitting;
  return int(steps < p.steps ? steps : p.steps);
}

// --- the workspace ----------------------------------------------------------------------------------

// Attention over the chosen tokens is split into this many parts, merged at the end. Beside the bytes of an E4M3 cache
// the parts would weigh twice as much, so a part is twice as long there.
__device__ __host__ inline int split_count(const SparseAttentionParams& p) {
  const int tokens = p.budget_blocks * p.block + p.block, part = kSplitTokens * (p.K == kFloat8E4M3 ? 2 : 1);
  return (tokens + part - 1) / part;
}

// A choice among many index blocks is made in parts: `kept_blocks` of each, and the budget of those.
__device__ __host__ inline int part_count(int blocks) { return (blocks + kPartBlocks - 1) / kPartBlocks; }
__device__ __host__ inline int kept_blocks(const SparseAttentionParams& p) {
  return p.budget_blocks < kPartBlocks ? p.budget_blocks : kPartBlocks;
}

// Scores of successive queries lie this far apart, so that pairs are aligned.
__device__ __host__ inline size_t score_stride(const SparseAttentionParams& p) {
  return (size_t(p.index_blocks) + 1) / 2 * 2;
}

// Without tensor cores there are `sums` and `parts`, with them `united`.
struct Workspace {
  float* index_query;  // [batch, steps, index_heads, index_head_dim], normalised and rotated
  float* scores;       // [batch, score_steps, score_stride]
  int* part_keys;      // [batch, score_steps, parts, kept]: scores that parts chose, as ordered integers
  int* part_blocks;    // likewise: their blocks
  int* chosen;         // [batch, steps, budget_blocks], -1 after the last
  int* united;         // [batch, tiles, 1 + tile_blocks]: how many, then blocks with masks (unite.h)
  float* sums;         // [batch, kStepTile, heads, splits, 2]: largest score, sum of weights
  void* parts;         // [batch, kStepTile, heads, splits, head_dim] T: weighted mean of the part's values
  size_t bytes;
};

// Elements of four bytes, so that the next array begins at a multiple of 16.
__device__ __host__ inline size_t padded(size_t count) { return (count + 3) / 4 * 4; }

__device__ __host__ inline Workspace workspace(const SparseAttentionParams& p) {
  const size_t tokens = size_t(p.batch) * p.steps;
  const size_t scored = p.blocks ? 0 : size_t(p.batch) * score_steps(p);
  const size_t splits = on_tensor_cores(p) ? 0 : size_t(p.batch) * kStepTile * p.heads * split_count(p);
  const size_t tiles = on_tensor_cores(p) ? size_t(p.batch) * tile_count(p) : 0;
  const size_t kept = p.index_blocks > kPartBlocks ? scored * part_count(p.index_blocks) * kept_blocks(p) : 0;
  float* const start = static_cast<float*>(p.workspace);
  Workspace w;
  w.index_query = start;
  w.scores = w.index_query + (p.blocks ? 0 : tokens * p.index_heads * p.index_head_dim);
  w.part_keys = reinterpret_cast<int*>(w.scores + padded(scored * score_stride(p)));
  w.part_blocks = w.part_keys + padded(kept);
  w.chosen = w.part_blocks + padded(kept);
  w.united = w.chosen + (p.blocks ? 0 : padded(tokens * p.budget_blocks));
  w.sums = reinterpret_cast<float*>(w.united + padded(tiles * (1 + tile_blocks(p))));
  w.parts = w.sums + splits * 2;
  const size_t part_bytes = splits * p.head_dim * (p.T == kFloat32 ? sizeof(Float32) : sizeof(BFloat16));
  w.bytes = (w.sums + splits * 2 - start) * sizeof(float) + part_bytes;
  return w;
}

// --- caches -----------------------------------------------------------------------------------------

// What the codes of a cache in E4M3 are multiplied by.
template <class C>
__device__ __forceinline__ float cache_scale(const float* scale) {
  return std::is_same_v<C, Float8E4M3> && scale ? load(scale) : 1.0f;
}

// --- a step's rows ----------------------------------------------------------------------------------

// One token of one sequence. `valid`: below new_len.
struct Query {
  int row, step, position;
  bool valid;
};

__device__ __forceinline__ Query query_at(const SparseAttentionParams& p, int row, int step) {
  const bool valid = step < p.steps && step < load(&p.new_len[row]);
  return {row, step, load(&p.past_len[row]) + step, valid};
}

// Index blocks whose tokens a query sees completely.
__device__ __forceinline__ int complete_blocks(const SparseAttentionParams& p, const Query& query) {
  return (query.position + 1) / p.block;
}

// Place of a query in the arrays of the steps that are scored at a time, `first` and following.
__device__ __forceinline__ size_t score_place(const SparseAttentionParams& p, const Query& query, int first) {
  return size_t(query.row) * score_steps(p) + query.step - first;
}

// Likewise of those that are attended at a time without tensor cores.
__device__ __forceinline__ size_t tile_place(const Query& query, int first) {
  return size_t(query.row) * kStepTile + query.step - first;
}

__device__ __forceinline__ size_t token_place(const SparseAttentionParams& p, const Query& query) {
  return size_t(query.row) * p.steps + query.step;
}

// The queries of a tile of attention: `count` steps from `first` on are valid.
struct QueryTile {
  int row, first, count;
};

__device__ __forceinline__ QueryTile query_tile(const SparseAttentionParams& p, int row, int tile) {
  const int first = tile * tile_queries(p), left = load(&p.new_len[row]) - first;
  return {row, first, max(0, min(left, tile_queries(p)))};
}

// Whether its queries see all tokens up to their own: all complete blocks of the last one fit the budget.
__device__ __forceinline__ bool is_dense(const SparseAttentionParams& p, const QueryTile& tile) {
  const Query last = query_at(p, tile.row, tile.first + tile.count - 1);
  return !p.blocks && complete_blocks(p, last) <= p.budget_blocks;
}

}  // namespace flashnext::sparse_attention
