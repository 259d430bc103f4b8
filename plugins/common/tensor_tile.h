// BF16 tiles in shared memory and their products on tensor cores: what the kernels for long steps share.
//
// A kernel stages a tile of each operand (`stage_rows`, in the background), waits, and lets every warp add the product
// of its rows of both to its accumulators (`warp_product`). Fragments are those of mma m16n8k16, fetched by ldmatrix.
//
// No bank conflicts: shared memory has 32 banks of four bytes, and both a phase of ldmatrix (eight rows, the same 16
// bytes of each) and eight neighbouring lanes that store 16 bytes each have to reach all of them. Rows of 32, 64, 128,
// … bytes would put the eight rows on the same banks, so the 16-byte units of a row change places: unit u of row r lies
// where u xor (r or a part of r) says. Nothing is padded.
#pragma once

#include "common/memory.h"
#include "common/ptx.h"
#include "common/reduce.h"

namespace flashnext {

constexpr int kMmaRows = 16;   // of A, per product
constexpr int kMmaDepth = 16;  // columns of A, per product
constexpr int kPair = 16;      // columns of C that a pair of products makes: ldmatrix fetches B for both at once

// Rows of `Columns` values; `values` is aligned to 128 bytes.
template <int Columns>
struct Tile {
  static_assert(Columns == 16 || Columns == 32 || Columns % 64 == 0, "rows that fill the banks evenly");
  static constexpr int kUnits = Columns / kChunk;
  static constexpr int kPlaces = kUnits < 8 ? kUnits : 8;  // among which a unit moves
  static constexpr int kRowsAlike = 8 / kPlaces;           // neighbouring rows that fill the 32 banks together

  BFloat16* values;

  __device__ __forceinline__ BFloat16* at(int row, int column) const {
    const int unit = column / kChunk ^ row / kRowsAlike % kPlaces;
    return values + row * Columns + unit * kChunk + column % kChunk;
  }
  // The tile from this row on, a multiple of 8.
  __device__ __forceinline__ Tile from_row(int row) const { return {values + row * Columns}; }
  __device__ __host__ static constexpr size_t bytes(int rows) { return size_t(rows) * Columns * sizeof(BFloat16); }
};

// --- filling a tile ---------------------------------------------------------------------------------

// Eight values of a row; `column` is a multiple of 8.
template <int Columns>
__device__ __forceinline__ void put_chunk(Tile<Columns> tile, int row, int column, const Packed<BFloat16>& values) {
  *reinterpret_cast<Packed<BFloat16>*>(tile.at(row, column)) = values;
}

// Two neighbouring values; `column` is even.
template <int Columns>
__device__ __forceinline__ void put_pair(Tile<Columns> tile, int row, int column, float x, float y) {
  const uint32_t low = from_float<BFloat16>(x).bits, high = from_float<BFloat16>(y).bits;
  *reinterpret_cast<uint32_t*>(tile.at(row, column)) = low | high << 16;
}

// The two back again.
template <int Columns>
__device__ __forceinline__ float2 get_pair(Tile<Columns> tile, int row, int column) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(tile.at(row, column));
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

// Copies `rows` rows in the background, by a block of `Threads`; the caller commits and waits. `row_at(i)` is where row
// i's values begin in global memory, aligned to 16 bytes, or null for a row of zeros; so rows may be gathered, and cut
// off at an edge. Of each row `columns` values (a multiple of 8; may be more than the tile has, or negative) are there,
// the others become zero.
template <int Threads, int Columns, class RowAt>
__device__ __forceinline__ void stage_rows(Tile<Columns> tile, int rows, int columns, RowAt row_at) {
  constexpr int kUnits = Tile<Columns>::kUnits;
  for (int i = threadIdx.x; i < rows * kUnits; i += Threads) {
    const int row = i / kUnits, column = i % kUnits * kChunk;
    const BFloat16* from = row_at(row);
    if (from && column < columns) {
      copy_async(tile.at(row, column), from + column);
    } else {
      put_chunk(tile, row, column, {});
    }
  }
}

// --- fragments --------------------------------------------------------------------------------------

// A fragment from rows 0 … 15 and columns `column` … + 15 of the tile.
template <int Columns>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], Tile<Columns> tile, int column) {
  const int lane = threadIdx.x % kWarpSize;
  load_matrices(a, shared_address(tile.at(lane % 16, column + lane / 16 * 8)));
}

// The same from a tile that holds A transposed: its rows `row` … + 15 are columns of A, its columns `column` … rows of
// A.
template <int Columns>
__device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], Tile<Columns> tile, int row, int column) {
  const int lane = threadIdx.x % kWarpSize;
  const int k = lane % 8 + lane / 16 * 8, m = lane / 8 % 2 * 8;
  load_matrices_transposed(a, shared_address(tile.at(row + k, column + m)));
}

// B fragments of two products, from a tile [N, K]: its rows 0 … 15 are the 16 columns of C, its columns `column` … + 15
// the depth.
template <int Columns>
__device__ __forceinline__ void load_b(uint32_t (&b)[2][2], Tile<Columns> tile, int column) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t r[4];
  load_matrices(r, shared_address(tile.at(lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * 8)));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// The same from a tile [K, N]: its rows `row` … + 15 are the depth, its columns `column` … + 15 those of C.
template <int Columns>
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[2][2], Tile<Columns> tile, int row, int column) {
  const int lane = threadIdx.x % kWarpSize;
  uint32_t r[4];
  load_matrices_transposed(r, shared_address(tile.at(row + lane % 16, column + lane / 16 * 8)));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// Where element i (0 … 3) of this lane's accumulator lies in its 16 x 8 product: 0 and 1 are neighbours, so are 2 and
// 3.
__device__ __forceinline__ int accumulator_row(int i) { return threadIdx.x % kWarpSize / 4 + i / 2 * 8; }
__device__ __forceinline__ int accumulator_column(int i) { return threadIdx.x % 4 * 2 + i % 2; }

// Two neighbouring products (columns 0 … 7 and 8 … 15), rounded, as the A fragment of a further one.
__device__ __forceinline__ void accumulators_as_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  UNROLL
  for (int i = 0; i < 4; i++) {
    const float* from = (i < 2 ? left : right) + i % 2 * 2;
    a[i] = from_float<BFloat16>(from[0]).bits | uint32_t(from_float<BFloat16>(from[1]).bits) << 16;
  }
}

// --- products ---------------------------------------------------------------------------------------

// sums[m][2 * n + h] += rows 16 * m … of `a` times rows n * step + 8 * h … of `b` (both [rows, depth]), over `Depth`
// columns from `a_column` and `b_column` on. Always in the same order.
template <int Depth, int Tiles, int Products, int AColumns, int BColumns>
__device__ __forceinline__ void warp_product(float (&sums)[Tiles][Products][4], Tile<AColumns> a, int a_column,
                                             Tile<BColumns> b, int b_column, int step = kPair) {
  static_assert(Products % 2 == 0, "two products share a load of B");
  UNROLL
  for (int k = 0; k < Depth; k += kMmaDepth) {
    uint32_t fragment[Tiles][4];
    UNROLL
    for (int m = 0; m < Tiles; m++) load_a(fragment[m], a.from_row(m * kMmaRows), a_column + k);
    UNROLL
    for (int n = 0; n < Products / 2; n++) {
      uint32_t pair[2][2];
      load_b(pair, b.from_row(n * step), b_column + k);
      UNROLL
      for (int m = 0; m < Tiles; m++) {
        mma_bf16(sums[m][2 * n], fragment[m], pair[0], sums[m][2 * n]);
        mma_bf16(sums[m][2 * n + 1], fragment[m], pair[1], sums[m][2 * n + 1]);
      }
    }
  }
}

}  // namespace flashnext
