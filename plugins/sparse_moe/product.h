// A tile of rows times 128 rows of an expert's weights, on tensor cores: 64 rows of each of two matrices (gate and up), or
// of one (down).
//
// Four warps, each with 16 weight rows of either half and all rows of the tile, so that a weight is decoded by one lane
// only. Windows of 64 columns are copied to shared memory in the background, three of them ahead. Rows are multiplied 16
// at a time, and sixteens without rows are left out.
//
// A row's result depends on its own values only: it is the same at every place of every tile.
#pragma once

#include "sparse_moe/fragments.h"
#include "sparse_moe/grouped_plan.h"

namespace flashnext::sparse_moe {

constexpr int kProductThreads = 128;
constexpr int kHalf = 64;  // weight rows of each half
constexpr int kStages = 4;
constexpr int kRowSteps = kRowTile / kMmaRows;
constexpr int kColumnSteps = 4;  // of 8 weight rows: the first two are a warp's of the first half

// The shared memory of a block: kStages windows of the rows, then kStages of the weights.
template <class W>
struct Stages {
  BFloat16* start;
  static constexpr size_t kRowBytes = Window<BFloat16>::bytes(kRowTile);
  static constexpr size_t kWeightBytes = Window<W>::bytes(2 * kHalf);
  static constexpr size_t kBytes = kStages * (kRowBytes + kWeightBytes);

  __device__ __forceinline__ Window<BFloat16> rows(int window) const {
    return {start + window % kStages * (kRowBytes / sizeof(BFloat16))};
  }
  __device__ __forceinline__ Window<W> weights(int window) const {
    return {start + (kStages * kRowBytes + window % kStages * kWeightBytes) / sizeof(BFloat16)};
  }
};

// Rows of a matrix from `first` on, of which `count` exist.
template <class W>
struct Half {
  Matrix<W> matrix;
  int first, count;
};

// Of the 8 weight rows of a column step: the half, and the place in it of row g.
__device__ __forceinline__ int half_of(int step) { return step / 2; }
__device__ __forceinline__ int row_in_half(int step, int g) { return threadIdx.x / kWarpSize * 16 + step % 2 * 8 + g; }

// `row_at(i)`: where row i < `rows` of the tile starts.
template <class W, class RowAt>
__device__ __forceinline__ void stage_window(const Stages<W>& stages, int window, int rows, RowAt row_at,
                                             const Half<W> (&halves)[2]) {
  constexpr int kPacked = Matrix<W>::kUnit / kChunk;  // weights that take the place of a BF16 value
  const int columns = halves[0].matrix.columns - window * kWindow;
  const int multiplied = (rows + kMmaRows - 1) / kMmaRows * kMmaRows;
  stage_rows<kProductThreads>(stages.rows(window), multiplied, columns, [&](int row) {
    return row < rows ? row_at(row) + window * kWindow : nullptr;
  });
  UNROLL
  for (int h = 0; h < 2; h++) {
    const Half<W>& half = halves[h];
    stage_rows<kProductThreads>(stages.weights(window).from_row(h * kHalf), kHalf, columns / kPacked, [&](int row) {
      const size_t start = (size_t(half.first + row) * half.matrix.columns + window * kWindow) / kPacked;
      return row < half.count ? static_cast<const BFloat16*>(half.matrix.values) + start : nullptr;
    });
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
      if (halves[h].count == 0) continue;
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

struct Sums {
  float at[kRowSteps][kColumnSteps][4];
};

template <class W>
__device__ __forceinline__ void multiply_window(Window<BFloat16> rows, int count, Window<W> weights,
                                                const Scales& scales, Sums& sums) {
  const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  Share columns[kColumnSteps];
  UNROLL
  for (int n = 0; n < kColumnSteps; n++) {
    columns[n] = read_share(W{}, weights, half_of(n) * kHalf + row_in_half(n, g), t, scales.at[n]);
  }
  UNROLL
  for (int m = 0; m < kRowSteps; m++) {
    if (kMmaRows * m >= count) continue;
    const Share low = read_share(BFloat16{}, rows, kMmaRows * m + g, t, 0.0f);
    const Share high = read_share(BFloat16{}, rows, kMmaRows * m + 8 + g, t, 0.0f);
    UNROLL
    for (int j = 0; j < kWindow / kMmaDepth; j++) {
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

// `rows` rows times those of the halves; FP8 sums each block of 128 columns by itself and multiplies the sum by its scale.
template <class W, class RowAt>
__device__ __forceinline__ Sums multiply(const Stages<W>& stages, int rows, RowAt row_at, const Half<W> (&halves)[2]) {
  constexpr bool kBlocks = Matrix<W>::kUnit == 16;
  constexpr int kScaleWindows = kBlocks ? kScaleBlock / kWindow : 1;  // windows that share their scales
  const int windows = (halves[0].matrix.columns + kWindow - 1) / kWindow;
  Sums sums = {}, block = {};
  for (int window = 0; window < kStages - 1; window++) {
    if (window < windows) stage_window(stages, window, rows, row_at, halves);
    commit_copies();
  }
  Scales scales = load_scales(halves, 0);
  for (int window = 0; window < windows; window++) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // all threads' copies of this window are there, and all have multiplied the one before
    const int ahead = window + kStages - 1;
    if (ahead < windows) stage_window(stages, ahead, rows, row_at, halves);
    commit_copies();
    const bool last = window + 1 == windows, block_ends = (window + 1) % kScaleWindows == 0;
    Scales next = scales;
    if (block_ends && !last) next = load_scales(halves, window + 1);
    multiply_window<W>(stages.rows(window), rows, stages.weights(window), scales, kBlocks ? block : sums);
    if (kBlocks && (block_ends || last)) fold(sums, block, scales);
    scales = next;
  }
  return sums;
}

}  // namespace flashnext::sparse_moe
