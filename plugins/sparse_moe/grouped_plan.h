// The grouped form's memory and its division of work; its launches are in grouped.h.
//
// A *pair* is a token and one of its choices. Pairs are sorted by expert, those of one expert by token; a pair's index
// in this order is its *place*. An expert's places are cut into tiles of up to 64 rows, and a tile is multiplied at
// once. How many tiles there are is known on the device only: grids are sized for the most that there can be.
#pragma once

#include "common/memory.h"
#include "sparse_moe/params.h"

namespace flashnext::sparse_moe {

constexpr int kRowTile = 64;     // rows of a tile: each reads its expert's weights once
constexpr int kGroupTokens = 32; // tokens that a block of the sorting launches takes

__device__ __host__ inline int pair_count(const SparseMoEParams& p) { return p.tokens * p.top_k; }
__device__ __host__ inline int group_count(const SparseMoEParams& p) {
  return (p.tokens + kGroupTokens - 1) / kGroupTokens;
}

// An expert without a full tile of rows still has one: at most `experts` tiles are not full, and no tile is empty.
__device__ __host__ inline int most_tiles(const SparseMoEParams& p) {
  const int pairs = pair_count(p), most = pairs / kRowTile + p.experts;
  return most < pairs ? most : pairs;
}

struct Tile {
  int expert, first, rows;  // places first … first + rows - 1
};

struct GroupedWorkspace {
  BFloat16* inner;  // [pairs, inner] by place: silu(gate x) * (up x)
  BFloat16* parts;  // [pairs, hidden] by place: what the experts give
  float* weights;   // [tokens, top_k]
  int* chosen;      // [tokens, top_k] experts
  int* places;      // [tokens, top_k]
  int* rows;        // [pairs] tokens, by place
  int* counts;      // [groups, experts] pairs of the group; then of all groups before it
  int* totals;      // [experts] pairs
  int* tiles;       // [most_tiles, 3]
  int* tile_count;  // [1]
  size_t bytes;
};

__device__ __host__ inline GroupedWorkspace grouped_workspace(const SparseMoEParams& p) {
  const size_t pairs = size_t(pair_count(p));
  char* next = static_cast<char*>(p.workspace);
  const auto take = [&next](size_t bytes) {
    void* const start = next;
    next += (bytes + 15) / 16 * 16;
    return start;
  };
  GroupedWorkspace w;
  w.inner = static_cast<BFloat16*>(take(pairs * p.inner * sizeof(BFloat16)));
  w.parts = static_cast<BFloat16*>(take(pairs * p.hidden * sizeof(BFloat16)));
  w.weights = static_cast<float*>(take(pairs * sizeof(float)));
  w.chosen = static_cast<int*>(take(pairs * sizeof(int)));
  w.places = static_cast<int*>(take(pairs * sizeof(int)));
  w.rows = static_cast<int*>(take(pairs * sizeof(int)));
  w.counts = static_cast<int*>(take(size_t(group_count(p)) * p.experts * sizeof(int)));
  w.totals = static_cast<int*>(take(p.experts * sizeof(int)));
  w.tiles = static_cast<int*>(take(size_t(most_tiles(p)) * 3 * sizeof(int)));
  w.tile_count = static_cast<int*>(take(sizeof(int)));
  w.bytes = size_t(next - static_cast<char*>(p.workspace));
  return w;
}

__device__ __forceinline__ Tile load_tile(const GroupedWorkspace& w, int index) {
  return {load(&w.tiles[3 * index]), load(&w.tiles[3 * index + 1]), load(&w.tiles[3 * index + 2])};
}

}  // namespace flashnext::sparse_moe
