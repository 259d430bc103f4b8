// Operands of tensor core products, read from shared memory and decoded in registers.
//
// A product may take its columns in any order, as long as both operands take the same one. Here lane 4g + t has 16
// neighbouring columns of row g, from 16t of a window of 64, and step j of the window's four multiplies its columns
// 4j … 4j + 3 (those that mma.m16n8k16 calls 2t, 2t + 1, 2t + 8 and 2t + 9). So a lane reads what it needs in pieces of 16
// bytes, whatever the format, every code is decoded once in a block, and an NVFP4 group is the share of one lane.
//
// What the products multiply is exact in BF16: an E4M3 code has four significant bits; an E2M1 code has two, and times
// its group's E4M3 scale six. Block scales and matrix scales are floats and multiply sums instead.
#pragma once

#include "common/tensor_tile.h"
#include "common/weights.h"

namespace flashnext::sparse_moe {

constexpr int kWindow = 64;  // columns

// 16 columns of a row, two BF16 values in a word.
struct Share {
  uint32_t pair[8];
};

// A window of 64 columns is a tile of as many bytes, whatever its format.
template <class W>
using Window = Tile<kWindow * 8 / Matrix<W>::kUnit>;

// 16 bytes of a row.
template <int Columns>
__device__ __forceinline__ uint4 read_unit(Tile<Columns> tile, int row, int unit) {
  return *reinterpret_cast<const uint4*>(tile.at(row, unit * kChunk));
}

// Four E2M1 codes, from the 16 low bits. Tables of the low and the high bytes of their magnitudes in BF16 are looked up
// with the codes as selectors; a selector's top bit repeats a byte's sign over it, which makes 0xFF of 0x80.
__device__ __forceinline__ void decode_e2m1(uint32_t codes, uint32_t scale, uint32_t* pair) {
  const uint32_t magnitudes = codes & 0x7777u;
  const uint32_t low = permute_bytes(0xC0800000u, 0xC0804000u, magnitudes);
  const uint32_t signs = permute_bytes(0x80u, 0u, codes & 0x8888u) << 1 & 0x80808080u;
  const uint32_t high = permute_bytes(0x3F3F3F00u, 0x40404040u, magnitudes) | signs;
  pair[0] = multiply_pairs(permute_bytes(low, high, 0x5140u), scale);
  pair[1] = multiply_pairs(permute_bytes(low, high, 0x7362u), scale);
}

__device__ __forceinline__ Share read_share(BFloat16, Window<BFloat16> tile, int row, int t, float) {
  const uint4 low = read_unit(tile, row, 2 * t), high = read_unit(tile, row, 2 * t + 1);
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

__device__ __forceinline__ Share read_share(Float8E4M3, Window<Float8E4M3> tile, int row, int t, float) {
  const uint4 codes = read_unit(tile, row, t);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  Share share;
  UNROLL
  for (int i = 0; i < 8; i++) {
    const float2 two = two_to_float(uint16_t(words[i / 2] >> 16 * (i % 2)));
    share.pair[i] = bf16_pair(two.x, two.y);
  }
  return share;
}

// `scale`: of the group.
__device__ __forceinline__ Share read_share(Float4E2M1, Window<Float4E2M1> tile, int row, int t, float scale) {
  const uint2 codes = *reinterpret_cast<const uint2*>(tile.at(row, 4 * t));
  const uint32_t scales = bf16_pair(scale, scale);
  Share share;
  decode_e2m1(codes.x, scales, share.pair);
  decode_e2m1(codes.x >> 16, scales, share.pair + 2);
  decode_e2m1(codes.y, scales, share.pair + 4);
  decode_e2m1(codes.y >> 16, scales, share.pair + 6);
  return share;
}

}  // namespace flashnext::sparse_moe
