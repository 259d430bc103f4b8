// What both kernels for long steps share: sizes, the workspace between them, and how weights come to a tile.
#pragma once

#include "common/tensor_tile.h"
#include "gated_residual/limits.h"

namespace flashnext {
namespace gated_residual {
namespace prefill {

constexpr int kRoundTokens = 2048;  // per pair of launches
constexpr int kTokens = 64;         // of a tile
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kDepth = 32;          // columns of a stage
constexpr int kDepthUnits = kDepth / kChunk;
constexpr int kColumns = 64;        // of a branch, that `combine` works on at a time
constexpr int kUpRows = kMaxBranches * kColumns;
constexpr int kBlocks = 132;        // that fill the GPU aimed at: with fewer, the work is cut finer

static_assert(kTokens * kDepthUnits == kThreads, "a thread makes one unit of the state per stage");
static_assert(kColumns * kDepthUnits == kThreads, "a thread brings one unit of each branch's rows of W_up per stage");

// What `project` leaves for `combine`, for the tokens of a round.
struct Workspace {
  float* sums;     // [tokens, branches, columns]: W_down's and W_inject's rows times the normalised state
  float* factors;  // [tokens, branches]: 1 / rms
  float* scales;   // [tokens, branches]: what the stored codes of an FP8 state are multiples of
  int columns;     // rank + 4
};

__device__ __host__ inline Workspace workspace(const GatedResidualParams& p) {
  const int tokens = p.tokens < kRoundTokens ? p.tokens : kRoundTokens, columns = p.rank + kMaxBranches;
  float* sums = static_cast<float*>(p.workspace);
  float* factors = sums + size_t(tokens) * p.branches * columns;
  return {sums, factors, factors + size_t(tokens) * p.branches, columns};
}

inline int64_t workspace_bytes(const GatedResidualParams& p) {
  const int64_t tokens = p.tokens < kRoundTokens ? p.tokens : kRoundTokens;
  return tokens * p.branches * (p.rank + kMaxBranches + 2) * int64_t(sizeof(float));
}

// Brings rows of a weight matrix to a tile while the products of another stage run: BF16 by copies in the background,
// FP8 through registers, since it is widened on the way. Rows and columns as for `stage_rows`.
template <class W, int Rows>
struct WeightStage;

template <int Rows>
struct WeightStage<BFloat16, Rows> {
  template <class RowAt>
  __device__ __forceinline__ void begin(Tile<kDepth> tile, int rows, int columns, RowAt row_at) {
    stage_rows<kThreads>(tile, rows, columns, row_at);
  }
  __device__ __forceinline__ void finish(Tile<kDepth>, int) {}
};

template <int Rows>
struct WeightStage<Float8E4M3, Rows> {
  static constexpr int kUnits = Rows * kDepthUnits / kThreads;
  Packed<Float8E4M3> packed[kUnits];

  template <class RowAt>
  __device__ __forceinline__ void begin(Tile<kDepth>, int rows, int columns, RowAt row_at) {
    UNROLL
    for (int i = 0; i < kUnits; i++) {
      const int row = (threadIdx.x + i * kThreads) / kDepthUnits, column = threadIdx.x % kDepthUnits * kChunk;
      const Float8E4M3* from = row < rows ? row_at(row) : nullptr;
      packed[i] = from && column < columns ? load_packed(from + column) : Packed<Float8E4M3>{};
    }
  }
  __device__ __forceinline__ void finish(Tile<kDepth> tile, int rows) {
    UNROLL
    for (int i = 0; i < kUnits; i++) {
      keep_packed(packed[i]);
      const int row = (threadIdx.x + i * kThreads) / kDepthUnits, column = threadIdx.x % kDepthUnits * kChunk;
      if (row < rows) put_chunk(tile, row, column, pack(BFloat16{}, unpack(packed[i])));
    }
  }
};

}  // namespace prefill
}  // namespace gated_residual
}  // namespace flashnext
