// A tile of rows times 128 rows of an expert's weights, on tensor cores: 64 rows of each of two matrices (gate and up),
// or of one (down).
//
// Four warps, each with 16 weight rows of either half and all rows of the tile, so that a weight is decoded by one lane
// only. Weights are the A operand, 16 of their rows to a product; the tile's rows are the B operand, 8 to a product,
// and eights without rows are left out. Windows of 64 columns are copied to shared memory in the background, three of
// them ahead.
//
// A row's result depends on its own values only: it is the same at every place of every tile.
#pragma once

#include "sparse_moe/fragments.h"
#include "sparse_moe/grouped_plan.h"

namespace flashnext::sparse_moe {

constexpr int kProductThreads = 128;
constexpr int kHalf = 64;  // weight rows of each half
constexpr int kStages = 4;
constexpr int kMmaColumns = 8;
constexpr int kRowSteps = kRowTile / kMmaColumns;
constexpr int kCopySteps = 4;  // in which a block's threads copy a tile's rows

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

// A warp has 16 rows of each half, from here on.
__device__ __forceinline__ int warp_row() { return threadIdx.x / kWarpSize * kMmaRows; }

// What this thread copies of every window: the same 16 bytes of some rows of the tile and of both halves. Worked out
// once, so that a copy costs an addition and a comparison or two.
template <class W>
struct Copies {
  static constexpr int kRowUnits = Window<BFloat16>::kUnits, kWeightUnits = Window<W>::kUnits;
  static constexpr int kWeightRows = kProductThreads / kWeightUnits;  // of a half, that the threads copy at a time
  static constexpr int kRows = kProductThreads / kRowUnits;           // of the tile, likewise

  const uint4* rows;          // all
  uint32_t row[kCopySteps];   // this thread's, in units
  int row_count;              // rows of the tile
  const uint4* weights[2];    // this thread's first row of a half
  int weight_count[2];        // rows of the half from there on
  int columns;

  // `row_at(i)`: index in `all` of row i of the tile.
  template <class RowAt>
  __device__ __forceinline__ Copies(const BFloat16* all, int count, RowAt row_at, const Half<W> (&halves)[2])
      : rows(reinterpret_cast<const uint4*>(all)), row_count(count), columns(halves[0].matrix.columns) {
    UNROLL
    for (int i = 0; i < kCopySteps; i++) {
      const int index = threadIdx.x / kRowUnits + i * kRows;
      row[i] = index < count ? uint32_t(row_at(index)) * uint32_t(columns / kChunk) + threadIdx.x % kRowUnits : 0;
    }
    const int first = threadIdx.x / kWeightUnits, unit = threadIdx.x % kWeightUnits;
    UNROLL
    for (int h = 0; h < 2; h++) {
      const size_t start = size_t(halves[h].first + first) * (columns / Matrix<W>::kUnit) + unit;
      weights[h] = static_cast<const uint4*>(halves[h].matrix.values) + start;
      weight_count[h] = halves[h].count - first;
    }
  }

  // Beyond the last column and the last row everything is zero; what is not multiplied is left as it is.
  __device__ __forceinline__ void start(const Stages<W>& stages, int window) const {
    start_rows(stages.rows(window), window);
    start_weights(stages.weights(window), window);
  }

  __device__ __forceinline__ void start_rows(Window<BFloat16> tile, int window) const {
    const int unit = threadIdx.x % kRowUnits, first = threadIdx.x / kRowUnits;
    const bool inside = window * kWindow + unit * kChunk < columns;
    UNROLL
    for (int i = 0; i < kCopySteps; i++) {
      if (i * kRows >= row_count) continue;
      const bool valid = inside && first + i * kRows < row_count;
      copy_async(tile.at(first + i * kRows, unit * kChunk), rows + window * kRowUnits + row[i], valid ? 16 : 0);
    }
  }

  __device__ __forceinline__ void start_weights(Window<W> tile, int window) const {
    const int unit = threadIdx.x % kWeightUnits, first = threadIdx.x / kWeightUnits;
    const bool inside = window * kWindow + unit * Matrix<W>::kUnit < columns;
    const int stride = kWeightRows * (columns / Matrix<W>::kUnit);
    UNROLL
    for (int h = 0; h < 2; h++) {
      UNROLL
      for (int i = 0; i < kHalf / kWeightRows; i++) {
        const bool valid = inside && i * kWeightRows < weight_count[h];
        const uint4* from = weights[h] + window * kWeightUnits + i * stride;
        copy_async(tile.at(h * kHalf + first + i * kWeightRows, unit * kChunk), from, valid ? 16 : 0);
      }
    }
  }
};

// --- scales -----------------------------------------------------------------------------------------

// Of both halves. FP8: at[h][0] is the block's. NVFP4: those of this lane's groups.
struct Scales {
  float at[2][2];
};

template <class W>
__device__ __forceinline__ Scales load_scales(const Half<W> (&halves)[2], int window) {
  Scales scales = {};
  UNROLL
  for (int h = 0; h < 2; h++) {
    const auto& [matrix, first, count] = halves[h];
    if constexpr (Matrix<W>::kUnit == 16) {
      const int across = (matrix.columns + kScaleBlock - 1) / kScaleBlock;
      if (count == 0) continue;
      scales.at[h][0] = load(&matrix.scale[first / kScaleBlock * across + window * kWindow / kScaleBlock]);
    } else if constexpr (Matrix<W>::kUnit == 32) {
      const int group = window * (kWindow / kScaleGroup) + threadIdx.x % 4, groups = matrix.columns / kScaleGroup;
      const auto* all = reinterpret_cast<const Float8E4M3*>(matrix.group_scale);
      UNROLL
      for (int second = 0; second < 2; second++) {
        const int row = warp_row() + weight_row(threadIdx.x % kWarpSize / 4, second);
        if (row < count && group < groups) scales.at[h][second] = load(&all[size_t(first + row) * groups + group]);
      }
    }
  }
  return scales;
}

// --- the product ------------------------------------------------------------------------------------

struct Sums {
  float at[2][kRowSteps][4];
};

template <class W>
__device__ __forceinline__ void multiply_window(Window<BFloat16> rows, int count, Window<W> weights,
                                                const Scales& scales, Sums& sums) {
  uint32_t a[2][kSteps][4];
  UNROLL
  for (int h = 0; h < 2; h++) load_weights<W>(a[h], weights, h * kHalf + warp_row(), scales.at[h]);
  UNROLL
  for (int n = 0; n < kRowSteps; n++) {
    if (kMmaColumns * n >= count) continue;
    uint32_t b[kSteps][2];
    load_rows<W>(b, rows, kMmaColumns * n);
    UNROLL
    for (int j = 0; j < kSteps; j++) {
      UNROLL
      for (int h = 0; h < 2; h++) mma_bf16(sums.at[h][n], a[h][j], b[j], sums.at[h][n]);
    }
  }
}

// sums += scales * block; block = 0
__device__ __forceinline__ void fold(Sums& sums, Sums& block, const Scales& scales) {
  UNROLL
  for (int h = 0; h < 2; h++) {
    UNROLL
    for (int n = 0; n < kRowSteps; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        sums.at[h][n][i] += scales.at[h][0] * block.at[h][n][i];
        block.at[h][n][i] = 0.0f;
      }
    }
  }
}

// The tile's rows times those of the halves; FP8 sums each block of 128 columns by itself and multiplies the sum by its
// scale.
template <class W>
__device__ __forceinline__ Sums multiply(const Stages<W>& stages, const Copies<W>& copies, const Half<W> (&halves)[2]) {
  constexpr bool kBlocks = Matrix<W>::kUnit == 16;
  constexpr int kScaleWindows = kBlocks ? kScaleBlock / kWindow : 1;  // windows that share their scales
  const int windows = (halves[0].matrix.columns + kWindow - 1) / kWindow;
  Sums sums = {}, block = {};
  for (int window = 0; window < kStages - 1; window++) {
    if (window < windows) copies.start(stages, window);
    commit_copies();
  }
  Scales scales = load_scales(halves, 0);
  for (int window = 0; window < windows; window++) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // all threads' copies of this window are there, and all have multiplied the one before
    const int ahead = window + kStages - 1;
    if (ahead < windows) copies.start(stages, ahead);
    commit_copies();
    const bool last = window + 1 == windows, block_ends = (window + 1) % kScaleWindows == 0;
    Scales next = scales;
    if (block_ends && !last) next = load_scales(halves, window + 1);
    multiply_window<W>(stages.rows(window), copies.row_count, stages.weights(window), scales, kBlocks ? block : sums);
    if (kBlocks && (block_ends || last)) fold(sums, block, scales);
    scales = next;
  }
  return sums;
}

// Calls `use(row, column, two)` for this lane's results: two[h] are those of a row of the tile and of weight rows
// `column` and `column` + 1 of half h.
template <class Use>
__device__ __forceinline__ void for_each_pair(const Sums& sums, int count, Use use) {
  const int g = threadIdx.x % kWarpSize / 4, column = warp_row() + 2 * g;
  const bool reversed = weight_row(g, 0) != 2 * g;
  UNROLL
  for (int n = 0; n < kRowSteps; n++) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      const int row = kMmaColumns * n + accumulator_column(i);
      if (row >= count) continue;
      float2 two[2];
      UNROLL
      for (int h = 0; h < 2; h++) {
        const float first = sums.at[h][n][i], second = sums.at[h][n][2 + i];
        two[h] = reversed ? make_float2(second, first) : make_float2(first, second);
      }
      use(row, column, two);
    }
  }
}

}  // namespace flashnext::sparse_moe
