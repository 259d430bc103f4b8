// The first launch of a long step: the new state times W_down and W_inject, branch by branch. See prefill.h.
#pragma once

#include "common/residual.h"
#include "gated_residual/tile.h"

namespace flashnext {
namespace gated_residual {
namespace prefill {

// Loads of `Ahead` stages are under way at a time; what comes through registers has a set for each (`set`).

// The rows of W_down, and after them those of W_inject, that a block multiplies with; zeros after those.
template <class T, class W, int Rows, int Ahead>
struct DownRows {
  int down;        // of them are W_down's
  const W* from;   // first one of W_down, in the block's branch
  const T* inject; // first one of W_inject, in the block's branch, or null
  int branches;
  size_t stride;
  WeightStage<W, Rows> stages[Ahead];

  __device__ __forceinline__ DownRows(const GatedResidualParams& p, int first_row, int branch)
      : down(max(0, min(p.rank - first_row, Rows))),
        from(static_cast<const W*>(p.down_weight) + size_t(first_row) * p.branches * p.hidden + branch * p.hidden),
        inject(p.inject_weight ? static_cast<const T*>(p.inject_weight) + branch * p.hidden : nullptr),
        branches(p.branches),
        stride(size_t(p.branches) * p.hidden) {}

  __device__ __forceinline__ void begin(int set, Tile<kDepth> tile, int column, int hidden) {
    stages[set].begin(tile, down, hidden - column, [&](int row) { return from + row * stride + column; });
    stage_rows<kThreads>(tile.from_row(down), Rows - down, hidden - column, [&](int row) {
      return inject && row < branches ? inject + row * stride + column : nullptr;
    });
  }
  __device__ __forceinline__ void finish(int set, Tile<kDepth> tile) { stages[set].finish(tile, down); }
};

// A thread's part of the new state: eight columns per stage, always of the same token.
template <class T, class R, int Ahead>
struct StateRow {
  Residual residual;
  const T* gamma;
  int token, branch;
  bool valid;
  WriteFactors factors;
  Packed<T> row[Ahead], weight[Ahead];
  Packed<R> stored[Ahead];
  float square = 0.0f, largest = 0.0f;

  __device__ __forceinline__ StateRow(const GatedResidualParams& p, int token, int branch)
      : residual(residual_of(p)),
        gamma(static_cast<const T*>(p.norm_weight) + branch * p.hidden),
        token(token),
        branch(branch),
        valid(token < p.tokens),
        factors(valid ? write_factors(residual, token, branch) : WriteFactors{}) {}

  __device__ __forceinline__ void begin(int set, int column) {
    if (!valid || column >= residual.hidden) return;
    row[set] = load_row<T>(residual, token, branch, column);
    stored[set] = load_stored<R>(residual, token, branch, column);
    weight[set] = load_packed(gamma + column);
  }

  // Into row `tile_row` of the tile, times (1 + gamma).
  __device__ __forceinline__ void finish(int set, Tile<kDepth> tile, int tile_row, int column) {
    Chunk state{};
    if (valid && column < residual.hidden) {
      keep_packed(row[set]);
      keep_packed(stored[set]);
      keep_packed(weight[set]);
      state = state_of<T, R>(residual, row[set], stored[set], factors);
      const Chunk w = unpack(weight[set]);
      square = dot(state, state, square);
      UNROLL
      for (int i = 0; i < kChunk; i++) {
        largest = fmaxf(largest, fabsf(state.at[i]));
        state.at[i] *= 1.0f + w.at[i];
      }
    }
    put_chunk(tile, tile_row, column % kDepth, pack(BFloat16{}, state));
  }
};

// The sums of a token's four threads: its norm's factor, for everybody and for `combine`, and its scale.
template <class Row>
__device__ __forceinline__ void finish_norm(const GatedResidualParams& p, const Workspace& out, const Row& state,
                                            int place, bool writer, float* factor) {
  const float square = warp_sum(state.square, kDepthUnits), largest = warp_max(state.largest, kDepthUnits);
  if (threadIdx.x % kDepthUnits == 0) {
    *factor = rsqrtf(square / p.hidden + p.eps);
    if (writer && state.valid) {
      store(&out.factors[place], *factor);
      if (p.r_out_token_scale) store(&out.scales[place], dynamic_scale(largest));
    }
  }
  __syncthreads();
}

// An accumulator's four sums, times the factor of their token and the scale of their row of W_down.
__device__ __forceinline__ void store_sums(const GatedResidualParams& p, const Workspace& out, const float (&sums)[4],
                                           const float* factors, int first_token, int round_token, int row, int branch,
                                           int column) {
  const bool scaled = p.down_scale && column < p.rank;
  const float x_scale = scaled ? load(&p.down_scale[column]) : 1.0f;
  const float y_scale = scaled ? load(&p.down_scale[column + 1]) : 1.0f;
  UNROLL
  for (int half = 0; half < 2; half++) {
    const int token = row + accumulator_row(2 * half);
    if (first_token + token >= p.tokens) continue;
    float* to = out.sums + (size_t(round_token + token) * p.branches + branch) * out.columns + column;
    const float x = sums[2 * half] * factors[token], y = sums[2 * half + 1] * factors[token];
    store_pair(reinterpret_cast<Float32*>(to), make_float2(x * x_scale, y * y_scale));
  }
}

// How many stages are loaded ahead. With few tokens the products of a stage take less time than its loads.
template <int Pairs>
constexpr int kAhead = Pairs == 1 ? 3 : 1;

// Pairs: products of 16 rows of W_down that a warp has, so a block has 128 * Pairs rows.
// grid: (shares of the rows, branches, tiles of tokens).
template <class T, class R, class W, int Pairs>
__global__ void __launch_bounds__(kThreads) project(GatedResidualParams p, int first) {
  SHARED_MEMORY(BFloat16, memory);
  SHARED_ARRAY(float, factors, [kTokens]);
  constexpr int kRows = Pairs * kWarps * kPair, kSets = kAhead<Pairs>;
  allow_next_launch();
  const int warp = threadIdx.x / kWarpSize, branch = blockIdx.y, first_row = blockIdx.x * kRows;
  const int row = threadIdx.x / kDepthUnits, unit = threadIdx.x % kDepthUnits * kChunk;
  const auto state_tile = [&](int step) { return Tile<kDepth>{memory + step % 2 * kTokens * kDepth}; };
  const auto weight_tile = [&](int step) {
    return Tile<kDepth>{memory + 2 * kTokens * kDepth + step % (kSets + 1) * kRows * kDepth};
  };
  const int steps = (p.hidden + kDepth - 1) / kDepth;
  DownRows<T, W, kRows, kSets> weights(p, first_row, branch);
  UNROLL
  for (int step = 0; step < kSets; step++) {
    if (step < steps) weights.begin(step, weight_tile(step), step * kDepth, p.hidden);
    commit_copies();
  }
  wait_for_previous_launch();

  const int first_token = first + blockIdx.z * kTokens;
  StateRow<T, R, kSets> state(p, first_token + row, branch);
  UNROLL
  for (int step = 0; step < kSets; step++) state.begin(step, step * kDepth + unit);
  float sums[kTokens / kMmaRows][2 * Pairs][4] = {};
  for (int turn = 0; turn < steps; turn += kSets) {
    UNROLL
    for (int set = 0; set < kSets; set++) {
      const int step = turn + set;
      if (step >= steps) break;
      weights.finish(set, weight_tile(step));
      state.finish(set, state_tile(step), row, step * kDepth + unit);
      wait_for_copies<kSets - 1>();
      __syncthreads();  // this stage is there, and everybody is done with the one before
      if (step + kSets < steps) weights.begin(set, weight_tile(step + kSets), (step + kSets) * kDepth, p.hidden);
      commit_copies();
      state.begin(set, (step + kSets) * kDepth + unit);
      warp_product<kDepth>(sums, state_tile(step), 0, weight_tile(step).from_row(warp * kPair), 0, kWarps * kPair);
    }
  }

  const Workspace out = workspace(p);
  const int round_token = first_token - first;
  finish_norm(p, out, state, (round_token + row) * p.branches + branch, blockIdx.x == 0, &factors[row]);
  UNROLL
  for (int n = 0; n < 2 * Pairs; n++) {
    const int column = first_row + (n / 2 * kWarps + warp) * kPair + n % 2 * 8 + accumulator_column(0);
    if (column >= out.columns) continue;
    UNROLL
    for (int m = 0; m < kTokens / kMmaRows; m++) {
      store_sums(p, out, sums[m][n], factors, first_token, round_token, m * kMmaRows, branch, column);
    }
  }
}

}  // namespace prefill
}  // namespace gated_residual
}  // namespace flashnext
