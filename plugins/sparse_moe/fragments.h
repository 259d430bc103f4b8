// Operands of tensor core products, read from shared memory and decoded in registers.
//
// Weights are the A operand of mma.m16n8k16, rows of activations the B operand. Lane 4g + t has two neighbouring weight
// rows, 2g and 2g + 1 of sixteen, so that two neighbours of a result are stored at once. Which of them is its first
// alternates as the bits of g do (the Thue-Morse sequence): then the rows that lanes read together are different ones
// modulo 2, 4 and 8, and lie in different banks in tiles of every format.
//
// A product may take its columns in any order, as long as both operands take the same one. With BF16 weights it is the
// natural one, and ldmatrix brings the fragments. With codes, a lane has 16 neighbouring columns of its rows, from 16t
// of a window of 64, and step j of the window's four multiplies its columns 4j … 4j + 3 (those that the product calls
// 2t, 2t + 1, 2t + 8 and 2t + 9). So a lane reads pieces of 8 or 16 bytes, every code is decoded once in a block, and
// an NVFP4 group is the share of one lane.
//
// What the products multiply is exact in BF16: an E4M3 code has four significant bits; an E2M1 code has two, and times
// its group's E4M3 scale six. Block scales and matrix scales are floats and multiply sums instead.
#pragma once

#include "common/tensor_tile.h"
#include "common/weights.h"

namespace flashnext::sparse_moe {

constexpr int kWindow = 64;  // columns
constexpr int kSteps = kWindow / kMmaDepth;

// A window of 64 columns is a tile of as many bytes, whatever its format.
template <class W>
using Window = Tile<kWindow * 8 / Matrix<W>::kUnit>;

// Of 16 weight rows, the first (0) and the second (1) of lanes 4g … 4g + 3.
__device__ __forceinline__ int weight_row(int g, int second) { return 2 * g + ((__popc(g) + second) & 1); }

// 16 bytes of a row.
template <int Columns>
__device__ __forceinline__ uint4 read_unit(Tile<Columns> tile, int row, int unit) {
  return *reinterpret_cast<const uint4*>(tile.at(row, unit * kChunk));
}

// --- weights ----------------------------------------------------------------------------------------

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

// 16 columns of a row, two BF16 values in a word.
struct Share {
  uint32_t pair[2 * kSteps];
};

__device__ __forceinline__ Share decode(Window<Float8E4M3> tile, int row, int t, float) {
  const uint4 codes = read_unit(tile, row, t);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  Share share;
  UNROLL
  for (int i = 0; i < 2 * kSteps; i++) {
    const float2 two = two_to_float(uint16_t(words[i / 2] >> 16 * (i % 2)));
    share.pair[i] = bf16_pair(two.x, two.y);
  }
  return share;
}

// `scale`: of the group.
__device__ __forceinline__ Share decode(Window<Float4E2M1> tile, int row, int t, float scale) {
  const uint2 codes = *reinterpret_cast<const uint2*>(tile.at(row, 4 * t));
  const uint32_t scales = bf16_pair(scale, scale);
  Share share;
  decode_e2m1(codes.x, scales, share.pair);
  decode_e2m1(codes.x >> 16, scales, share.pair + 2);
  decode_e2m1(codes.y, scales, share.pair + 4);
  decode_e2m1(codes.y >> 16, scales, share.pair + 6);
  return share;
}

// A fragments of a window's steps, from rows `row` … + 15; `scales`: of the lane's two rows.
template <class W>
__device__ __forceinline__ void load_weights(uint32_t (&a)[kSteps][4], Window<W> tile, int row,
                                             const float (&scales)[2]) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  UNROLL
  for (int second = 0; second < 2; second++) {
    const Share share = decode(tile, row + weight_row(g, second), t, scales[second]);
    UNROLL
    for (int i = 0; i < 2 * kSteps; i++) a[i / 2][i % 2 * 2 + second] = share.pair[i];
  }
}

template <>
__device__ __forceinline__ void load_weights<BFloat16>(uint32_t (&a)[kSteps][4], Window<BFloat16> tile, int row,
                                                       const float (&)[2]) {
  const int g = threadIdx.x % 8, matrix = threadIdx.x % kWarpSize / 8;
  UNROLL
  for (int j = 0; j < kSteps; j++) {
    const int column = j * kMmaDepth + matrix / 2 * kChunk;
    load_matrices(a[j], shared_address(tile.at(row + weight_row(g, matrix % 2), column)));
  }
}

// --- rows -------------------------------------------------------------------------------------------

// B fragments of a window's steps for weights W, from rows `row` … + 7.
template <class W>
__device__ __forceinline__ void load_rows(uint32_t (&b)[kSteps][2], Window<BFloat16> tile, int row) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  UNROLL
  for (int i = 0; i < 2; i++) {
    const uint4 unit = read_unit(tile, row + g, 2 * t + i);
    b[2 * i][0] = unit.x, b[2 * i][1] = unit.y, b[2 * i + 1][0] = unit.z, b[2 * i + 1][1] = unit.w;
  }
}

template <>
__device__ __forceinline__ void load_rows<BFloat16>(uint32_t (&b)[kSteps][2], Window<BFloat16> tile, int row) {
  const int lane = threadIdx.x % kWarpSize;
  UNROLL
  for (int i = 0; i < 2; i++) {
    uint32_t r[4];
    load_matrices(r, shared_address(tile.at(row + lane % 8, (4 * i + lane / 8) * kChunk)));
    b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
  }
}

}  // namespace flashnext::sparse_moe
