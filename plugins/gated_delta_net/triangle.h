// Inverse of a unit lower triangular 64 x 64 matrix in float, in place in shared memory.
//
// Diagonal blocks of 8 by forward substitution, a thread per column. Two inverted neighbours X and Z with the block C
// below X and beside Z then become one of twice the size, whose new block is -Z C X. No product in this exceeds the
// inverse itself, whose elements stay within 1 for keys of unit length; series like (I - A)(I + A^2)… reach 1e8 where
// keys repeat.
#pragma once

#include "common/memory.h"

namespace flashnext::gated_delta_net {

constexpr int kOrder = 64;
constexpr int kPitch = kOrder + 4;  // rows that begin on different banks, aligned for float4
constexpr int kSolvers = 64;        // threads per matrix
constexpr int kDiagonal = 8;

// out += rows of `left` (from its row `row` on) times columns column … + 3 of `right`, both Size x Size.
template <int Size, int Rows>
__device__ __forceinline__ void add_product(float (&out)[Rows][4], const float* left, const float* right) {
  NO_UNROLL
  for (int k = 0; k < Size; k += 2) {
    float2 a[Rows];
    UNROLL
    for (int r = 0; r < Rows; r++) a[r] = *reinterpret_cast<const float2*>(left + r * kPitch + k);
    UNROLL
    for (int i = 0; i < 2; i++) {
      const float4 b = *reinterpret_cast<const float4*>(right + (k + i) * kPitch);
      UNROLL
      for (int r = 0; r < Rows; r++) {
        const float factor = i == 0 ? a[r].x : a[r].y;
        out[r][0] += factor * b.x;
        out[r][1] += factor * b.y;
        out[r][2] += factor * b.z;
        out[r][3] += factor * b.w;
      }
    }
  }
}

template <int Rows>
__device__ __forceinline__ void put_rows(float* to, const float (&values)[Rows][4], float sign) {
  UNROLL
  for (int r = 0; r < Rows; r++) {
    const float* v = values[r];
    *reinterpret_cast<float4*>(to + r * kPitch) = make_float4(sign * v[0], sign * v[1], sign * v[2], sign * v[3]);
  }
}

// Joins the inverted blocks of `Size` into blocks of twice that. All threads of the block call it; barriers inside.
template <int Size>
__device__ __forceinline__ void join_blocks(float* matrix, int thread, bool inside) {
  constexpr int kThreads = kSolvers * 2 * Size / kOrder;  // per pair of blocks
  constexpr int kRows = Size * Size / 4 / kThreads;       // a thread makes that many rows of four columns
  const int pair = thread / kThreads, place = thread % kThreads;
  const int row = place / (Size / 4) * kRows, column = place % (Size / 4) * 4;
  float* upper = matrix + pair * 2 * Size * (kPitch + 1);
  float *lower = upper + Size * (kPitch + 1), *below = upper + Size * kPitch;
  NO_UNROLL
  for (int factor = 0; factor < 2; factor++) {  // C X, then Z times that
    float out[kRows][4] = {};
    const float *left = factor == 0 ? below : lower, *right = factor == 0 ? upper : below;
    if (inside) add_product<Size>(out, left + row * kPitch, right + column);
    __syncthreads();
    if (inside) put_rows(below + row * kPitch + column, out, factor == 0 ? 1.0f : -1.0f);
    __syncthreads();
  }
}

// `matrix` [64][kPitch] holds A, with zeros above it in the two diagonal blocks of 32; afterwards (I + A)^-1, likewise.
// `thread` 0 … 63 of those `inside`; all threads of the block call it.
__device__ __forceinline__ void invert_triangle(float* matrix, int thread, bool inside) {
  const int column = thread % kDiagonal;
  float* diagonal = matrix + thread / kDiagonal * kDiagonal * (kPitch + 1);
  float x[kDiagonal];
  if (inside) {
    UNROLL
    for (int r = 0; r < kDiagonal; r++) {
      x[r] = r == column ? 1.0f : 0.0f;
      UNROLL
      for (int s = 0; s < r; s++) x[r] -= diagonal[r * kPitch + s] * x[s];
    }
  }
  __syncthreads();
  if (inside) {
    UNROLL
    for (int r = 0; r < kDiagonal; r++) diagonal[r * kPitch + column] = x[r];
  }
  __syncthreads();
  join_blocks<kDiagonal>(matrix, thread, inside);
  join_blocks<2 * kDiagonal>(matrix, thread, inside);
  join_blocks<4 * kDiagonal>(matrix, thread, inside);
}

}  // namespace flashnext::gated_delta_net
