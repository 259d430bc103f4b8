// The form for long steps of BF16 activations, in six launches: pairs of token and expert are sorted by expert
// (sort.h), an expert's weights are read once for every 64 of its rows, and each token sums what its experts gave, best
// first.
//
// The host knows neither how many rows an expert has nor how many tiles there are. Grids are sized for the most that
// there can be; blocks beyond the last tile return at once. Tiles of one expert are neighbours in the grid, so that
// they find its weights in the L2 cache.
//
// Between the launches lie silu(gate x) * (up x) and every expert's result, in BF16.
#pragma once

#include "common/math.h"
#include "sparse_moe/experts.h"
#include "sparse_moe/product.h"
#include "sparse_moe/sort.h"

namespace flashnext::sparse_moe {

constexpr int kCombineThreads = 128;
constexpr int kCombineInFlight = 4;

template <class W>
__device__ __forceinline__ Half<W> half_from(const Matrix<W>& matrix, int first, int rows) {
  return {matrix, first, first < rows ? min(rows - first, kHalf) : 0};
}

__device__ __forceinline__ float matrix_scale(const Matrix<BFloat16>&) { return 1.0f; }
__device__ __forceinline__ float matrix_scale(const Matrix<Float8E4M3>&) { return 1.0f; }
__device__ __forceinline__ float matrix_scale(const Matrix<Float4E2M1>& matrix) { return matrix.scale; }

// grid: (most_tiles, inner / 64)
template <class W>
__global__ void __launch_bounds__(kProductThreads) expand(SparseMoEParams p) {
  SHARED_MEMORY(BFloat16, stages);
  allow_next_launch();
  wait_for_previous_launch();
  const GroupedWorkspace w = grouped_workspace(p);
  if (int(blockIdx.x) >= load(w.tile_count)) return;
  const Tile tile = load_tile(w, blockIdx.x);
  const int first = blockIdx.y * kHalf;
  const Half<W> halves[2] = {half_from(gate_up<W>(p, tile.expert, 0), first, p.inner),
                             half_from(gate_up<W>(p, tile.expert, 1), first, p.inner)};
  const auto row_at = [&](int row) { return load(&w.rows[tile.first + row]); };
  const Copies<W> copies(static_cast<const BFloat16*>(p.x), tile.rows, row_at, halves);
  const Sums sums = multiply(Stages<W>{stages}, copies, halves);
  const float gate_scale = matrix_scale(halves[0].matrix), up_scale = matrix_scale(halves[1].matrix);
  for_each_pair(sums, tile.rows, [&](int row, int column, const float2 (&two)[2]) {
    if (first + column >= p.inner) return;
    const float2 gate = two[0], up = two[1];
    store_pair(&w.inner[size_t(tile.first + row) * p.inner + first + column],
               {silu(gate.x * gate_scale) * (up.x * up_scale), silu(gate.y * gate_scale) * (up.y * up_scale)});
  });
}

// grid: (most_tiles, hidden / 128)
template <class W>
__global__ void __launch_bounds__(kProductThreads) contract(SparseMoEParams p) {
  SHARED_MEMORY(BFloat16, stages);
  allow_next_launch();
  wait_for_previous_launch();
  const GroupedWorkspace w = grouped_workspace(p);
  if (int(blockIdx.x) >= load(w.tile_count)) return;
  const Tile tile = load_tile(w, blockIdx.x);
  const int first = blockIdx.y * 2 * kHalf;
  const Matrix<W> matrix = down<W>(p, tile.expert);
  const Half<W> halves[2] = {half_from(matrix, first, p.hidden), half_from(matrix, first + kHalf, p.hidden)};
  const Copies<W> copies(w.inner, tile.rows, [&](int row) { return tile.first + row; }, halves);
  const Sums sums = multiply(Stages<W>{stages}, copies, halves);
  const float scale = matrix_scale(matrix);
  for_each_pair(sums, tile.rows, [&](int row, int column, const float2 (&two)[2]) {
    BFloat16* const to = w.parts + size_t(tile.first + row) * p.hidden + first + column;
    UNROLL
    for (int h = 0; h < 2; h++) {
      if (column < halves[h].count) store_pair(to + h * kHalf, {two[h].x * scale, two[h].y * scale});
    }
  });
}

// A thread has eight columns of a token. grid: (hidden / 1024, tokens)
__global__ void __launch_bounds__(kCombineThreads) combine(SparseMoEParams p) {
  allow_next_launch();
  wait_for_previous_launch();
  const GroupedWorkspace w = grouped_workspace(p);
  const int token = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * kChunk;
  if (column >= p.hidden) return;
  Chunk sum = {};
  for (int first = 0; first < p.top_k; first += kCombineInFlight) {
    Packed<BFloat16> parts[kCombineInFlight];
    float weights[kCombineInFlight];
    UNROLL
    for (int i = 0; i < kCombineInFlight; i++) {
      if (first + i >= p.top_k) continue;
      const int pair = token * p.top_k + first + i;
      weights[i] = load(&w.weights[pair]);
      parts[i] = load_packed(w.parts + size_t(load(&w.places[pair])) * p.hidden + column);
    }
    UNROLL
    for (int i = 0; i < kCombineInFlight; i++) {
      if (first + i >= p.top_k) continue;
      const Chunk part = unpack(parts[i]);
      UNROLL
      for (int j = 0; j < kChunk; j++) sum.at[j] += weights[i] * part.at[j];
    }
  }
  store_chunk(static_cast<BFloat16*>(p.y) + size_t(token) * p.hidden + column, sum);
}

template <class W>
Status launch_grouped(const SparseMoEParams& p) {
  const dim3 groups(group_count(p)), sort_threads(kSortThreads), threads(kProductThreads);
  Status status = launch(route_group<BFloat16>, groups, sort_threads, 0, p.stream, p);
  const dim3 experts((p.experts + kWarpSize - 1) / kWarpSize);
  if (status) status = launch(add_up, experts, sort_threads, 0, p.stream, p);
  if (status) status = launch(place_group, groups, sort_threads, 0, p.stream, p);
  constexpr size_t kShared = Stages<W>::kBytes;
  const dim3 expand_grid(most_tiles(p), (p.inner + kHalf - 1) / kHalf);
  if (status) status = launch(expand<W>, expand_grid, threads, kShared, p.stream, p);
  const dim3 contract_grid(most_tiles(p), (p.hidden + 2 * kHalf - 1) / (2 * kHalf));
  if (status) status = launch(contract<W>, contract_grid, threads, kShared, p.stream, p);
  const int columns = kCombineThreads * kChunk;
  const dim3 combine_grid((p.hidden + columns - 1) / columns, p.tokens);
  if (status) status = launch(combine, combine_grid, dim3(kCombineThreads), 0, p.stream, p);
  return status;
}

}  // namespace flashnext::sparse_moe
