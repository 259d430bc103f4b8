// The second launch of a long step: W_up, the gates, the block input and the new state. See prefill.h.
#pragma once

#include "common/math.h"
#include "common/residual.h"
#include "gated_residual/tile.h"

namespace flashnext {
namespace gated_residual {
namespace prefill {

// Eight columns of the branches' sums, over n.
__device__ __forceinline__ Chunk mean_sums(const GatedResidualParams& p, const Workspace& from, int token, int column) {
  Chunk total{};
#pragma unroll 1
  for (int branch = 0; branch < p.branches; branch++) {
    const auto* sums = reinterpret_cast<const Float32*>(from.sums);
    const Chunk sum = load_chunk(sums + (size_t(token) * p.branches + branch) * from.columns + column);
    UNROLL
    for (int i = 0; i < kChunk; i++) total.at[i] += sum.at[i];
  }
  UNROLL
  for (int i = 0; i < kChunk; i++) total.at[i] *= 1.0f / p.branches;
  return total;
}

// SiLU of the tile's low-rank vectors, with zeros up to a whole stage and for tokens that are not there.
__device__ __forceinline__ void prepare_low(const GatedResidualParams& p, const Workspace& from, int round_token,
                                            int tokens, Tile<kMaxRank> low) {
  const int units = (p.rank + kDepth - 1) / kDepth * kDepthUnits;
#pragma unroll 1
  for (int i = threadIdx.x; i < kTokens * units; i += kThreads) {
    const int token = i / units, column = i % units * kChunk;
    Chunk values{};
    if (token < tokens && column < p.rank) {
      values = mean_sums(p, from, round_token + token, column);
      UNROLL
      for (int j = 0; j < kChunk; j++) values.at[j] = silu(values.at[j]);
    }
    put_chunk(low, token, column, pack(BFloat16{}, values));
  }
}

// What is one per token and branch: a thread each.
__device__ __forceinline__ void write_token_outputs(const GatedResidualParams& p, const Workspace& from,
                                                    int first_token, int round_token, int tokens) {
  const int i = threadIdx.x / p.branches, branch = threadIdx.x % p.branches;
  if (i >= tokens) return;
  const int place = (first_token + i) * p.branches + branch;
  if (p.s_out) {
    float sum = 0.0f;
    for (int b = 0; b < p.branches; b++) {
      sum += load(&from.sums[(size_t(round_token + i) * p.branches + b) * from.columns + p.rank + branch]);
    }
    store(&p.s_out[place], 2.0f * sigmoid(sum * (1.0f / p.branches)));
  }
  if (!p.r_out_token_scale) return;
  store(&p.r_out_token_scale[place], load(&from.scales[(round_token + i) * p.branches + branch]));
}

// W_up's products for the warp's 32 tokens and 16 columns of every branch, into the block's [tokens, branches*columns].
__device__ __forceinline__ void put_products(const float (&sums)[2][2 * kMaxBranches][4], int warp_token,
                                             int warp_column, Tile<kUpRows> products) {
  UNROLL
  for (int n = 0; n < 2 * kMaxBranches; n++) {
    const int column = n / 2 * kColumns + warp_column + n % 2 * 8 + accumulator_column(0);
    UNROLL
    for (int i = 0; i < 4; i++) {  // two tiles of 16 rows, two halves of each
      const int token = warp_token + i / 2 * kMmaRows + accumulator_row(i % 2 * 2);
      put_pair(products, token, column, sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1]);
    }
  }
}

// Where eight columns of a token are found: in the step, in the round, and in the tile of products.
struct Place {
  int token, round_token, column, row, tile_column;
};

// Adds one branch's share of x, and stores the branch's new state.
template <class R>
__device__ __forceinline__ void gate_branch(const GatedResidualParams& p, const Workspace& from, const Place& at,
                                            int branch, Chunk& state, const Chunk& gamma, Tile<kUpRows> products,
                                            Chunk& total) {
  const auto* product = products.at(at.row, branch * kColumns + at.tile_column);
  Chunk gate = unpack(*reinterpret_cast<const Packed<BFloat16>*>(product));
  if (p.up_scale) {
    const Chunk scale = load_chunk(reinterpret_cast<const Float32*>(p.up_scale) + branch * p.hidden + at.column);
    UNROLL
    for (int i = 0; i < kChunk; i++) gate.at[i] *= scale.at[i];
  }
  const int place = at.round_token * p.branches + branch;
  const float factor = load(&from.factors[place]);
  UNROLL
  for (int i = 0; i < kChunk; i++) {
    total.at[i] += sigmoid(gate.at[i]) * (state.at[i] * factor * (1.0f + gamma.at[i]));
  }
  if (!p.r_out) return;
  if constexpr (sizeof(R) == 1) {
    const float scale = p.r_out_token_scale ? load(&from.scales[place]) : load(&p.r_out_scale[branch]);
    const Rounding rounding = rounding_of(p, at.token, branch);
    UNROLL
    for (int i = 0; i < kChunk; i++) state.at[i] = quotient(state.at[i], scale, rounding, at.column + i);
  }
  store_chunk(static_cast<R*>(p.r_out) + (size_t(at.token) * p.branches + branch) * p.hidden + at.column, state);
}

// Eight columns of one token: x, and the new state of every branch. The next branch's are loaded ahead.
template <class T, class R>
__device__ __forceinline__ void gate_token(const GatedResidualParams& p, const Workspace& from, const Place& at,
                                           Tile<kUpRows> products) {
  const Residual residual = residual_of(p);
  const auto* gamma = static_cast<const T*>(p.norm_weight) + at.column;
  Packed<T> row = load_row<T>(residual, at.token, 0, at.column), weight = load_packed(gamma);
  Packed<R> stored = load_stored<R>(residual, at.token, 0, at.column);
  Chunk total{};
#pragma unroll 1
  for (int branch = 0; branch < p.branches; branch++) {
    const int next = min(branch + 1, p.branches - 1);
    Chunk state = state_of<T, R>(residual, row, stored, write_factors(residual, at.token, branch));
    const Chunk gamma_here = unpack(weight);
    if (next != branch) {
      if (residual.start) row = load_row<T>(residual, at.token, next, at.column);
      stored = load_stored<R>(residual, at.token, next, at.column);
      weight = load_packed(gamma + next * p.hidden);
    }
    gate_branch<R>(p, from, at, branch, state, gamma_here, products, total);
  }
  UNROLL
  for (int i = 0; i < kChunk; i++) total.at[i] *= 1.0f / p.branches;
  store_chunk(static_cast<T*>(p.x) + size_t(at.token) * p.hidden + at.column, total);
}

// A stage of W_up's rows for a group of columns: a thread's are the same column of every branch.
template <class W>
__device__ __forceinline__ void begin_up_rows(const GatedResidualParams& p, WeightStage<W, kUpRows>& stage,
                                              Tile<kDepth> tile, int group, int step) {
  // Found anew for every stage: kept, all the addresses would take registers that the products need.
  unsigned thread_row = threadIdx.x / kDepthUnits;
  keep_packed(thread_row);
  const int column = group * kColumns + thread_row;
  const W* from = static_cast<const W*>(p.up_weight) + size_t(column) * p.rank + step * kDepth;
  stage.begin(tile, kUpRows, p.rank - step * kDepth, [&](int row) {
    const int branch = row / kColumns;
    return branch < p.branches && column < p.hidden ? from + size_t(branch) * p.hidden * p.rank : nullptr;
  });
  commit_copies();
}

// grid: (shares of the columns, tiles of tokens).
template <class T, class R, class W>
__global__ void __launch_bounds__(kThreads, 2) combine(GatedResidualParams p, int first) {
  SHARED_MEMORY(BFloat16, memory);
  allow_next_launch();
  const Tile<kMaxRank> low{memory};
  const auto weight_tile = [&](int step) {
    return Tile<kDepth>{memory + kTokens * kMaxRank + step % 2 * kUpRows * kDepth};
  };
  const Tile<kUpRows> products{weight_tile(0).values};  // in the same place, when the weights are used up
  static_assert(Tile<kUpRows>::bytes(kTokens) <= 2 * Tile<kDepth>::bytes(kUpRows));

  const int groups = (p.hidden + kColumns - 1) / kColumns, per_block = (groups + gridDim.x - 1) / gridDim.x;
  const int begin = blockIdx.x * per_block, end = min(begin + per_block, groups);
  const int steps = (p.rank + kDepth - 1) / kDepth;
  const int warp_token = threadIdx.x / kWarpSize % 2 * 32, warp_column = threadIdx.x / kWarpSize / 2 * kPair;
  const int round_token = blockIdx.y * kTokens, first_token = first + round_token;
  const int tokens = min(kTokens, p.tokens - first_token);
  const Workspace from = workspace(p);
  WeightStage<W, kUpRows> weights;
#pragma unroll 1
  for (int group = begin; group < end; group++) {
    float sums[2][2 * kMaxBranches][4] = {};
#pragma unroll 1
    for (int step = -1; step < steps; step++) {  // -1: brings the first stage, and does what need not wait for it
      if (step >= 0) {
        weights.finish(weight_tile(step), kUpRows);
        wait_for_copies<0>();
        __syncthreads();  // this stage is there, and everybody is done with the other one
      }
      if (step + 1 < steps) begin_up_rows(p, weights, weight_tile(step + 1), group, step + 1);
      if (step >= 0) {
        warp_product<kDepth>(sums, low.from_row(warp_token), step * kDepth, weight_tile(step).from_row(warp_column), 0,
                             kColumns);
      } else if (group == begin) {
        wait_for_previous_launch();
        prepare_low(p, from, round_token, tokens, low);
        if (blockIdx.x == 0) write_token_outputs(p, from, first_token, round_token, tokens);
      }
    }
    __syncthreads();
    put_products(sums, warp_token, warp_column, products);
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * (kColumns / kChunk); i += kThreads) {
      const int token = i / (kColumns / kChunk), offset = i % (kColumns / kChunk) * kChunk;
      const Place at{first_token + token, round_token + token, group * kColumns + offset, token, offset};
      if (at.column < p.hidden) gate_token<T, R>(p, from, at, products);
    }
    __syncthreads();
  }
}

}  // namespace prefill
}  // namespace gated_residual
}  // namespace flashnext
