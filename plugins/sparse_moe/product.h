// A tile of rows times 128 rows of an expert's weights, on tensor cores: 64 rows of each of two matrices (gate and up), or
// of one (down).
//
// Four warps, each with 16 weight rows of either half and all rows of the tile, so that a weight is decoded by one lane
// only. Windows of 64 columns are copied to shared memory in the background, three of them ahead. Rows are multiplied 16
// at a time, and sixteens without rows are left out.
//
// A row's result depends on its own values only: it is the same at every place of every tile.
#pragma once

#include "common/reduce.h"
#include "sparse_moe/fragments.h"
#include "sparse_moe/grouped_plan.h"

namespace flashnext::sparse_moe {

constexpr int kProductThreads = 128;
constexpr int kHalf = 64;  // weight rows of each half
constexpr int kStages = 4;
constexpr int kRowSteps = kRowTile / 16;  // an mma takes 16 rows …
constexpr int kColumnSteps = 4;           // … and 8 weight rows; a warp has this many of them
constexpr int kRowChunks = kWindow / 8;   // of 16 bytes, in a window of BF16

template <class W>
struct Stage {
  static constexpr int kWeightChunks = kWindow / Matrix<W>::kUnit;
  uint4 rows[kRowTile * kRowChunks];
  uint4 weights[2 * kHalf * kWeightChunks];
};

// Rows of a matrix from `first` on, of which `count` exist.
template <class W>
struct Half {
  Matrix<W> matrix;
  int first, count;
};

// This thread's part in copying rows: of row threadIdx.x / 8 + 16i, the chunk threadIdx.x % 8 of every window.
struct Rows {
  const BFloat16* from[kRowSteps];
  int count;
};

struct Sums {
  float at[kRowSteps][kColumnSteps][4];
};

// Of the 8 weight rows of a column step: the half, and the place in it of row g.
__device__ __forceinline__ int half_of(int step) { return step / 2; }
__device__ __forceinline__ int row_in_half(int step, int g) { return threadIdx.x / kWarpSize * 16 + step % 2 * 8 + g; }

template <class W>
__device__ __forceinline__ void stage_window(Stage<W>& stage, const Rows& rows, const Half<W> (&halves)[2], int window) {
  constexpr int kChunks = Stage<W>::kWeightChunks, kUnit = Matrix<W>::kUnit;
  const int columns = halves[0].matrix.columns;
  {
    const int chunk = threadIdx.x % kRowChunks, column = window * kWindow + chunk * 8;
    UNROLL
    for (int i = 0; i < kRowSteps; i++) {
      const int row = threadIdx.x / kRowChunks + 16 * i;
      if (16 * i >= rows.count) continue;
      const bool valid = row < rows.count && column < columns;
      copy_async(&stage.rows[chunk_place<kRowChunks>(row, chunk)], rows.from[i] + (valid ? column : 0), valid ? 16 : 0);
    }
  }
  const int chunk = threadIdx.x % kChunks, column = window * kWindow + chunk * kUnit;
  UNROLL
  for (int i = 0; i < kChunks; i++) {  // the threads copy 128 / kChunks rows at a time
    const Half<W>& half = halves[i / (kChunks / 2)];
    const int place = threadIdx.x / kChunks + i * (kProductThreads / kChunks), row = place % kHalf;
    const bool valid = row < half.count && column < columns;
    const size_t unit = (size_t(half.first + (valid ? row : 0)) * columns + (valid ? column : 0)) / kUnit;
    copy_async(&stage.weights[chunk_place<kChunks>(place, chunk)], static_cast<const uint4*>(half.matrix.values) + unit,
               valid ? 16 : 0);
  }
}

// --- scales -----------------------------------------------------------------------------------------

struct Scales {
  float at[kColumnSteps];
};

// FP8: those of the two halves' blocks, in at[0] and at[1]. NVFP4: of this lane's groups.
template <class W>
__device__ __forceinline__ Scales load_scales(const Half<W> (&halves)[2], int window) {
  Scales scales = {};
  if constexpr (Matrix<W>::kUnit == 16) {
    UNROLL
    for (int h = 0; h < 2; h++) {
      const Matrix<W>& matrix = halves[h].matrix;
      const int across = (matrix.columns + kScaleBlock - 1) / kScaleBlock;
      scales.at[h] = load(&matrix.scale[halves[h].first / kScaleBlock * across + window * kWindow / kScaleBlock]);
    }
  } else if constexpr (Matrix<W>::kUnit == 32) {
    const int lane = threadIdx.x % kWarpSize, group = window * (kWindow / kScaleGroup) + lane % 4;
    UNROLL
    for (int n = 0; n < kColumnSteps; n++) {
      const Half<W>& half = halves[half_of(n)];
      const int row = row_in_half(n, lane / 4), groups = half.matrix.columns / kScaleGroup;
      if (row >= half.count || group >= groups) continue;
      const auto* all = reinterpret_cast<const Float8E4M3*>(half.matrix.group_scale);
      scales.at[n] = load(&all[size_t(half.first + row) * groups + group]);
    }
  }
  return scales;
}

// --- the product ------------------------------------------------------------------------------------

template <class W>
__device__ __forceinline__ void multiply_window(const Stage<W>& stage, const Scales& scales, int rows, Sums& sums) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  Share columns[kColumnSteps];
  UNROLL
  for (int n = 0; n < kColumnSteps; n++) {
    columns[n] = read_share(stage.weights, W{}, half_of(n) * kHalf + row_in_half(n, g), t, scales.at[n]);
  }
  UNROLL
  for (int m = 0; m < kRowSteps; m++) {
    if (16 * m >= rows) continue;
    const Share low = read_share(stage.rows, BFloat16{}, 16 * m + g, t, 0.0f);
    const Share high = read_share(stage.rows, BFloat16{}, 16 * m + 8 + g, t, 0.0f);
    UNROLL
    for (int j = 0; j < 4; j++) {
      const uint32_t a[4] = {low.pair[2 * j], high.pair[2 * j], low.pair[2 * j + 1], high.pair[2 * j + 1]};
      UNROLL
      for (int n = 0; n < kColumnSteps; n++) {
        const uint32_t b[2] = {columns[n].pair[2 * j], columns[n].pair[2 * j + 1]};
        mma_bf16(sums.at[m][n], a, b, sums.at[m][n]);
      }
    }
  }
}

// sums += scales * block; block = 0
__device__ __forceinline__ void fold(Sums& sums, Sums& block, const Scales& scales) {
  UNROLL
  for (int m = 0; m < kRowSteps; m++) {
    UNROLL
    for (int n = 0; n < kColumnSteps; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        sums.at[m][n][i] += scales.at[half_of(n)] * block.at[m][n][i];
        block.at[m][n][i] = 0.0f;
      }
    }
  }
}

// FP8 sums each block of 128 columns by itself and multiplies the sum by the block's scale.
template <class W>
__device__ __forceinline__ Sums multiply(Stage<W>* stages, const Rows& rows, const Half<W> (&halves)[2]) {
  constexpr bool kBlocks = Matrix<W>::kUnit == 16;
  const int windows = (halves[0].matrix.columns + kWindow - 1) / kWindow;
  Sums sums = {}, block = {};
  for (int s = 0; s < kStages - 1; s++) {
    if (s < windows) stage_window(stages[s], rows, halves, s);
    commit_copies();
  }
  Scales scales = load_scales(halves, 0);
  for (int window = 0; window < windows; window++) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // all threads' copies of this window are there, and all have multiplied the one before
    const int ahead = window + kStages - 1;
    if (ahead < windows) stage_window(stages[ahead % kStages], rows, halves, ahead);
    commit_copies();
    const Scales next = load_scales(halves, window + 1 < windows ? window + 1 : window);
    multiply_window(stages[window % kStages], scales, rows.count, kBlocks ? block : sums);
    if (kBlocks && ((window + 1) % (kScaleBlock / kWindow) == 0 || window + 1 == windows)) fold(sums, block, scales);
    scales = next;
  }
  return sums;
}

}  // namespace flashnext::sparse_moe
