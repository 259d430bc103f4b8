// Limits, the workspace, and what a step's rows mean; shared by the kernels of SparseAttention.
#pragma once

#include "common/memory.h"
#include "sparse_attention/params.h"

namespace flashnext::sparse_attention {

constexpr int kStepTile = 8;       // tokens of each sequence that are attended at a time in parts
constexpr int kSplitTokens = 64;   // that a block attends to at a time
constexpr int kMaxHeadDim = 256;
constexpr int kMaxIndexDim = 128;
constexpr int kMaxIndexHeads = 8;
constexpr int kMaxGroup = 16;      // query heads that share a key head
constexpr int kPartBlocks = 8192;  // index blocks among which a block of threads chooses

// Attention over the chosen tokens is split into this many parts, merged at the end.
__device__ __host__ inline int split_count(const SparseAttentionParams& p) {
  return (p.budget_blocks * p.block + p.block + kSplitTokens - 1) / kSplitTokens;
}

// A choice among many index blocks is made in parts: `kept_blocks` of each, and the budget of those.
__device__ __host__ inline int part_count(int blocks) { return (blocks + kPartBlocks - 1) / kPartBlocks; }
__device__ __host__ inline int kept_blocks(const SparseAttentionParams& p) {
  return p.budget_blocks < kPartBlocks ? p.budget_blocks : kPartBlocks;
}

struct Workspace {
  float* query;        // [batch, steps, heads, head_dim], normalised and rotated
  float* index_query;  // [batch, steps, index_heads, index_head_dim], likewise
  float* scores;       // [batch, kStepTile, index_blocks]
  int* part_keys;      // [batch, kStepTile, parts, kept]: scores that parts chose, as ordered integers
  int* part_blocks;    // likewise: their blocks
  int* chosen;         // [batch, kStepTile, budget_blocks], -1 after the last
  float* sums;         // [batch, kStepTile, heads, splits, 2]: largest score, sum of weights
  void* parts;         // [batch, kStepTile, heads, splits, head_dim] T: weighted mean of the part's values
  size_t bytes;
};

__device__ __host__ inline Workspace workspace(const SparseAttentionParams& p) {
  const size_t tokens = size_t(p.batch) * p.steps, tile = size_t(p.batch) * kStepTile;
  const size_t splits = tile * p.heads * split_count(p);
  const size_t parts = p.blocks || p.index_blocks <= kPartBlocks ? 0 : part_count(p.index_blocks);
  float* const start = static_cast<float*>(p.workspace);
  Workspace w;
  w.query = start;
  w.index_query = w.query + tokens * p.heads * p.head_dim;
  w.scores = w.index_query + tokens * p.index_heads * p.index_head_dim;
  w.part_keys = reinterpret_cast<int*>(w.scores + (p.blocks ? 0 : tile * p.index_blocks));
  w.part_blocks = w.part_keys + tile * parts * kept_blocks(p);
  w.chosen = w.part_blocks + tile * parts * kept_blocks(p);
  w.sums = reinterpret_cast<float*>(w.chosen + tile * p.budget_blocks);
  w.parts = w.sums + splits * 2;
  const size_t part_bytes = splits * p.head_dim * (p.T == kFloat32 ? sizeof(Float32) : sizeof(BFloat16));
  w.bytes = (w.sums + splits * 2 - start) * sizeof(float) + part_bytes;
  return w;
}

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

// Place of a query in the arrays of the tile that starts at `first`.
__device__ __forceinline__ size_t tile_place(const Query& query, int first) {
  return size_t(query.row) * kStepTile + query.step - first;
}

__device__ __forceinline__ size_t token_place(const SparseAttentionParams& p, const Query& query) {
  return size_t(query.row) * p.steps + query.step;
}

}  // namespace flashnext::sparse_attention
