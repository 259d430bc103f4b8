// A round's tokens on their way from a cache to a tile for tensor cores.
//
// BF16 rows are copied to where the products read them. E4M3 codes are copied as they are and then unpacked, by all
// threads, into one tile that keys and values use in turn: BF16 holds every code exactly, and the cache's scale
// multiplies sums. Both ways take the same shared memory.
#pragma once

#include "common/tensor_tile.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

constexpr int kTileThreads = 128;
constexpr int kTileTokens = 64;
constexpr int kTileValues = kTileTokens * kMaxHeadDim;

using HeadTile = Tile<kMaxHeadDim>;

// Tokens of one round: where they are (-1: nobody sees it), and a bit for every query that sees them.
struct TokenRound {
  int position[kTileTokens];
  unsigned seen[kTileTokens];
};

// Where the head of token i of a round lies in a cache; null where nobody sees the token.
template <class C>
struct RoundRows {
  const C* head;  // of the slot's first token
  size_t stride;
  const TokenRound& round;
  __device__ __forceinline__ const C* operator()(int i) const {
    const int position = round.position[i];
    return position < 0 ? nullptr : head + position * stride;
  }
};

template <class C>
__device__ __forceinline__ RoundRows<C> round_rows(const SparseAttentionParams& p, const void* cache, int slot,
                                                   int kv_head, const TokenRound& round) {
  const C* from = static_cast<const C*>(cache) + (size_t(slot) * p.tokens * p.kv_heads + kv_head) * p.head_dim;
  return {from, size_t(p.kv_heads) * p.head_dim, round};
}

template <class C>
struct TokenRows;

template <>
struct TokenRows<BFloat16> {
  static constexpr int kUnpacked = kChunk;  // nothing; arrays cannot be empty
  BFloat16 values[kTileValues];

  // Copies the rows in the background.
  __device__ __forceinline__ void stage(const SparseAttentionParams& p, const void* cache, int slot, int kv_head,
                                        const TokenRound& round) {
    const auto rows = round_rows<BFloat16>(p, cache, slot, kv_head, round);
    stage_rows<kTileThreads>(HeadTile{values}, kTileTokens, p.head_dim, rows);
  }
  // The rows that have arrived, for all threads.
  __device__ __forceinline__ HeadTile tile(int, HeadTile) { return {values}; }
};

template <>
struct TokenRows<Float8E4M3> {
  static constexpr int kUnpacked = kTileValues;
  static constexpr int kUnit = 16;  // codes that are copied at once; rows have a multiple of them
  static constexpr int kRowUnits = kMaxHeadDim / kUnit;
  uint4 codes[kTileTokens * kRowUnits];

  __device__ __forceinline__ void stage(const SparseAttentionParams& p, const void* cache, int slot, int kv_head,
                                        const TokenRound& round) {
    const auto rows = round_rows<Float8E4M3>(p, cache, slot, kv_head, round);
    for (int i = threadIdx.x; i < kTileTokens * kRowUnits; i += kTileThreads) {
      const Float8E4M3* from = rows(i / kRowUnits);
      const int column = i % kRowUnits * kUnit;
      if (from && column < p.head_dim) {
        copy_async(&codes[i], from + column);
      } else {
        codes[i] = uint4{};
      }
    }
  }
  __device__ __forceinline__ HeadTile tile(int head_dim, HeadTile unpacked) {
    for (int i = threadIdx.x; i < kTileTokens * kRowUnits; i += kTileThreads) {
      const int row = i / kRowUnits, column = i % kRowUnits * kUnit;
      if (column >= head_dim) continue;
      const uint4 unit = codes[i];
      put_chunk(unpacked, row, column, pack(BFloat16{}, unpack(Packed<Float8E4M3>{{unit.x, unit.y}})));
      put_chunk(unpacked, row, column + kChunk, pack(BFloat16{}, unpack(Packed<Float8E4M3>{{unit.z, unit.w}})));
    }
    __syncthreads();
    return unpacked;
  }
};

}  // namespace flashnext::sparse_attention
