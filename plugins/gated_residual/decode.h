// GatedResidual for decoding and verification, and for every step in float: two launches.
//
// `project` multiplies the new state with W_down and W_inject. A block owns four rows of one branch, so it needs only
// that branch; the norm's factor is one number per branch and multiplies the finished product, so that the sum of
// squares and the products come from one pass and the weights, loaded first, wait for nothing. `combine` multiplies
// with W_up: a warp owns one column of all branches (eight lanes each), so that the mean over the branches stays inside
// it.
//
// `combine` reads the state a second time (20 KB at official sizes beside 6.5 MB of weights) instead of keeping 40 KB
// of floats in between, and is the only one to write it, so r_out may be r.
#pragma once

#include "common/math.h"
#include "common/reduce.h"
#include "common/residual.h"
#include "gated_residual/limits.h"

namespace flashnext {
namespace gated_residual {
namespace decode {

constexpr int kRows = 4;          // of W_down, per block
constexpr int kMaxThreads = 512;  // of `project`; each owns one chunk of columns
constexpr int kTokens = 8;        // that a block takes with the weights it has loaded
constexpr int kWarps = 8;         // of `combine`; each owns one column
constexpr int kRowLanes = 8;      // that share a row of W_up
constexpr int kUpChunks = kMaxRank / (kRowLanes * kChunk);  // of a row of W_up, per lane
static_assert(kMaxBranches * kRowLanes == kWarpSize);

// Sizes that both kernels and the workspace share.
struct Plan {
  int threads, splits, parts, columns;
};

__device__ __host__ inline Plan plan(const GatedResidualParams& p) {
  const int chunks = p.hidden / kChunk;
  const int threads = chunks < kMaxThreads ? (chunks + kWarpSize - 1) / kWarpSize * kWarpSize : kMaxThreads;
  const int splits = (chunks + threads - 1) / threads;
  return {threads, splits, splits * p.branches, p.rank + p.branches};
}

// What `project` leaves for `combine`, per token and part (one split of one branch).
struct Workspace {
  float* products;  // [tokens, parts, rank + branches]
  float* squares;   // [tokens, parts]
  float* largest;   // [tokens, parts]
};

__device__ __host__ inline Workspace workspace(const GatedResidualParams& p, const Plan& sizes) {
  float* products = static_cast<float*>(p.workspace);
  float* squares = products + size_t(p.tokens) * sizes.parts * sizes.columns;
  return {products, squares, squares + size_t(p.tokens) * sizes.parts};
}

// --- project ----------------------------------------------------------------------------------------

// Four rows of `weight` [rows, branches*hidden] from `first_row` on; results go to columns `first_column` … .
template <class T, class R, class W>
__device__ __forceinline__ void project_rows(const GatedResidualParams& p, const W* weight, int rows, int first_row,
                                             int first_column, float* parts) {
  const Plan sizes = plan(p);
  const int branch = blockIdx.y / sizes.splits, split = blockIdx.y % sizes.splits;
  const int column = (split * blockDim.x + threadIdx.x) * kChunk;
  const bool inside = column < p.hidden;
  Packed<W> packed[kRows];
  UNROLL
  for (int i = 0; i < kRows; i++) {
    const int row = first_row + i;
    if (inside && row < rows) {
      packed[i] = load_packed(weight + size_t(row) * p.branches * p.hidden + branch * p.hidden + column);
    }
  }
  Chunk gamma{};
  if (inside) gamma = load_chunk(static_cast<const T*>(p.norm_weight) + branch * p.hidden + column);
  wait_for_previous_launch();

  const Workspace out = workspace(p, sizes);
  const int first = blockIdx.z * kTokens, last = min(first + kTokens, p.tokens);
  for (int token = first; token < last; token++) {
    float sums[kRows + 1] = {};
    float largest = 0.0f;
    if (inside) {
      Chunk state = new_state<T, R>(residual_of(p), token, branch, column);
      sums[kRows] = dot(state, state, 0.0f);
      UNROLL
      for (int i = 0; i < kChunk; i++) {
        largest = fmaxf(largest, fabsf(state.at[i]));
        state.at[i] *= 1.0f + gamma.at[i];
      }
      UNROLL
      for (int i = 0; i < kRows; i++) {
        keep_packed(packed[i]);
        if (first_row + i < rows) sums[i] = dot(state, unpack(packed[i]), 0.0f);
      }
    }
    // Two halves of `parts` in turn: one barrier per token.
    float* half = parts + (token & 1) * (kRows + 2) * (kMaxThreads / kWarpSize);
    largest = warp_max(largest);
    if (threadIdx.x % kWarpSize == 0) half[(kRows + 1) * (kMaxThreads / kWarpSize) + threadIdx.x / kWarpSize] = largest;
    block_sum(sums, half);
    const int place = token * sizes.parts + blockIdx.y;
    UNROLL
    for (int i = 0; i < kRows; i++) {
      const bool mine = int(threadIdx.x) == i && first_row + i < rows;
      if (mine) store(&out.products[size_t(place) * sizes.columns + first_column + i], sums[i]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      for (int w = 0; w < int(blockDim.x) / kWarpSize; w++) {
        largest = fmaxf(largest, half[(kRows + 1) * (kMaxThreads / kWarpSize) + w]);
      }
      store(&out.squares[place], sums[kRows]);
      store(&out.largest[place], largest);
    }
  }
}

template <class T, class R, class W>
__global__ void __launch_bounds__(kMaxThreads) project(GatedResidualParams p) {
  SHARED_ARRAY(float, parts, [2 * (kRows + 2) * (kMaxThreads / kWarpSize)]);
  allow_next_launch();
  const int row = blockIdx.x * kRows, down_groups = (p.rank + kRows - 1) / kRows;
  if (int(blockIdx.x) < down_groups) {
    project_rows<T, R>(p, static_cast<const W*>(p.down_weight), p.rank, row, row, parts);
  } else {
    const int inject_row = row - down_groups * kRows;
    const auto* weight = static_cast<const T*>(p.inject_weight);
    project_rows<T, R>(p, weight, p.branches, inject_row, p.rank + inject_row, parts);
  }
}

// --- combine ----------------------------------------------------------------------------------------

// 1 / rms of one branch of the new state.
__device__ __forceinline__ float norm_factor(const GatedResidualParams& p, const Plan& sizes, const float* squares,
                                             int token, int branch) {
  float sum = 0.0f;
  for (int i = 0; i < sizes.splits; i++) sum += load(&squares[token * sizes.parts + branch * sizes.splits + i]);
  return rsqrtf(sum / p.hidden + p.eps);
}

// Row `column` of W_down (or, from rank on, of W_inject) times the normalised state, over n.
__device__ __forceinline__ float projected(const GatedResidualParams& p, const Plan& sizes, const Workspace& from,
                                           const float* factors, int token, int column) {
  float sum = 0.0f;
  for (int part = 0; part < sizes.parts; part++) {
    const size_t place = (size_t(token) * sizes.parts + part) * sizes.columns + column;
    sum += load(&from.products[place]) * factors[part / sizes.splits];
  }
  if (p.down_scale && column < p.rank) sum *= load(&p.down_scale[column]);
  return sum * (1.0f / p.branches);
}

// What the stored codes of an FP8 branch are multiples of.
__device__ __forceinline__ float store_scale(const GatedResidualParams& p, const Plan& sizes, const float* largest,
                                             int token, int branch) {
  if (!p.r_out_token_scale) return p.r_out_scale ? load(&p.r_out_scale[branch]) : 1.0f;
  float most = 0.0f;
  for (int i = 0; i < sizes.splits; i++) {
    most = fmaxf(most, load(&largest[token * sizes.parts + branch * sizes.splits + i]));
  }
  return dynamic_scale(most);
}

// SiLU of the low-rank vector and the norm factors of one token, for the whole block; the first block of columns also
// writes what is one per token.
__device__ __forceinline__ void prepare_token(const GatedResidualParams& p, const Plan& sizes, const Workspace& from,
                                              int token, float* low, float* factors) {
  if (int(threadIdx.x) < p.branches) {
    factors[threadIdx.x] = norm_factor(p, sizes, from.squares, token, threadIdx.x);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.rank; i += blockDim.x) {
    low[i] = silu(projected(p, sizes, from, factors, token, i));
  }
  if (blockIdx.x == 0 && int(threadIdx.x) < p.branches) {
    const int place = token * p.branches + threadIdx.x;
    if (p.s_out) {
      const float logit = projected(p, sizes, from, factors, token, p.rank + threadIdx.x);
      store(&p.s_out[place], 2.0f * sigmoid(logit));
    }
    if (p.r_out_token_scale) {
      store(&p.r_out_token_scale[place], store_scale(p, sizes, from.largest, token, threadIdx.x));
    }
  }
  __syncthreads();
}

template <class T, class R, class W>
__global__ void __launch_bounds__(kWarps * kWarpSize, sizeof(T) == 4 ? 2 : 3) combine(GatedResidualParams p) {
  SHARED_ARRAY(float, low, [2][kMaxRank]);
  SHARED_ARRAY(float, factors, [2][kMaxBranches]);
  allow_next_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int branch = lane / kRowLanes, row_lane = lane % kRowLanes;
  const int column = blockIdx.x * kWarps + warp;  // hidden is a multiple of kWarps: never outside
  const bool active = branch < p.branches;
  const int row = branch * p.hidden + column;
  Packed<W> packed[kUpChunks];
  UNROLL
  for (int i = 0; i < kUpChunks; i++) {
    const int place = (i * kRowLanes + row_lane) * kChunk;
    if (active && place < p.rank) {
      packed[i] = load_packed(static_cast<const W*>(p.up_weight) + size_t(row) * p.rank + place);
    }
  }
  const float gamma = active ? load(static_cast<const T*>(p.norm_weight) + row) : 0.0f;
  const float row_scale = active && p.up_scale ? load(&p.up_scale[row]) : 1.0f;
  wait_for_previous_launch();

  const Plan sizes = plan(p);
  const Workspace from = workspace(p, sizes);
  const int first = blockIdx.y * kTokens, last = min(first + kTokens, p.tokens);
  for (int token = first; token < last; token++) {
    const int half = token & 1;
    prepare_token(p, sizes, from, token, low[half], factors[half]);
    float logit = 0.0f;
    UNROLL
    for (int i = 0; i < kUpChunks; i++) {
      const int place = (i * kRowLanes + row_lane) * kChunk;
      if (active && place < p.rank) {
        keep_packed(packed[i]);
        const Chunk weight = unpack(packed[i]);
        UNROLL
        for (int j = 0; j < kChunk; j++) logit += weight.at[j] * low[half][place + j];
      }
    }
    logit = warp_sum(logit, kRowLanes) * row_scale;
    float term = 0.0f;
    if (active) {
      const float state = new_state_value<T, R>(residual_of(p), token, branch, column);
      term = sigmoid(logit) * state * factors[half][branch] * (1.0f + gamma);
      if (p.r_out && row_lane == 0) {
        auto* place = static_cast<R*>(p.r_out) + (size_t(token) * p.branches + branch) * p.hidden + column;
        if constexpr (sizeof(R) == 1) {
          const float scale = store_scale(p, sizes, from.largest, token, branch);
          store(place, quotient(state, scale, rounding_of(p, token, branch), column));
        } else {
          store(place, state);
        }
      }
    }
    for (int by = kRowLanes; by < kWarpSize; by *= 2) term += __shfl_xor_sync(kAllLanes, term, by);
    if (lane == 0) store(static_cast<T*>(p.x) + size_t(token) * p.hidden + column, term * (1.0f / p.branches));
  }
}

template <class T, class R, class W>
Status launch_formats(const GatedResidualParams& p) {
  const Plan sizes = plan(p);
  const int token_tiles = (p.tokens + kTokens - 1) / kTokens;
  const int groups = (p.rank + kRows - 1) / kRows + (p.inject_weight ? (p.branches + kRows - 1) / kRows : 0);
  const dim3 project_grid(groups, sizes.parts, token_tiles);
  const Status status = launch(project<T, R, W>, project_grid, dim3(sizes.threads), 0, p.stream, p);
  if (!status) return status;
  const dim3 combine_grid(p.hidden / kWarps, token_tiles);
  return launch(combine<T, R, W>, combine_grid, dim3(kWarps * kWarpSize), 0, p.stream, p);
}

inline int64_t workspace_bytes(const GatedResidualParams& p) {
  const Plan sizes = plan(p);
  return int64_t(p.tokens) * sizes.parts * (sizes.columns + 2) * int64_t(sizeof(float));
}

}  // namespace decode
}  // namespace gated_residual
}  // namespace flashnext
