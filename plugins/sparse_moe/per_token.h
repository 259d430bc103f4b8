// The form for decoding, in two launches: an expert is read once for each token that chose it.
//
// `expand_token` computes silu(gate x) * (up x): a warp owns one row of both. Every block routes its token by itself,
// in one warp, while the others bring x into shared memory: cheaper than a launch. `contract_token` multiplies with the
// down projections: a warp owns one output and sums over all chosen experts, so that nothing is added atomically.
#pragma once

#include "common/math.h"
#include "sparse_moe/experts.h"
#include "sparse_moe/router.h"

namespace flashnext::sparse_moe {

constexpr int kWarps = 8;
constexpr int kInFlight = 5;  // units that a lane loads before it uses the first

// What `expand` leaves for `contract`.
struct TokenWorkspace {
  float* inner;    // [tokens, top_k, inner]
  float* weights;  // [tokens, top_k]
  int* experts;    // [tokens, top_k]
};

__device__ __host__ inline TokenWorkspace token_workspace(const SparseMoEParams& p) {
  float* inner = static_cast<float*>(p.workspace);
  float* weights = inner + size_t(p.tokens) * p.top_k * p.inner;
  return {inner, weights, reinterpret_cast<int*>(weights + size_t(p.tokens) * p.top_k)};
}

// grid: (rows / kWarps, top_k, tokens)
template <class T, class W>
__global__ void __launch_bounds__(kWarps * kWarpSize) expand_token(SparseMoEParams p) {
  SHARED_MEMORY(float4, x);
  SHARED_ARRAY(Choice, choice, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int row = blockIdx.x * kWarps + warp, k = blockIdx.y, token = blockIdx.z;
  const int units = p.hidden / Matrix<W>::kUnit;
  if (warp == 0) route<T>(p, token, *choice);
  const T* from = static_cast<const T*>(p.x) + size_t(token) * p.hidden;
  for (int i = threadIdx.x; i < p.hidden / kChunk; i += blockDim.x) {
    const Chunk chunk = load_chunk(from + i * kChunk);
    UNROLL
    for (int j = 0; j < kChunk; j++) place_value<W>(x, units, i * kChunk + j, chunk.at[j]);
  }
  __syncthreads();
  const TokenWorkspace out = token_workspace(p);
  const size_t place = size_t(token) * p.top_k + k;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store(&out.experts[place], choice->expert[k]);
    store(&out.weights[place], choice->weight[k]);
  }
  if (row >= p.inner) return;
  const Matrix<W> gate = gate_up<W>(p, choice->expert[k], 0), up = gate_up<W>(p, choice->expert[k], 1);
  float gate_sum = 0.0f, up_sum = 0.0f;
  for (int first = lane; first < units; first += kInFlight * kWarpSize) {
    typename Matrix<W>::Loaded gates[kInFlight], ups[kInFlight];
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit >= units) continue;
      gates[i] = gate.load(row, unit);
      ups[i] = up.load(row, unit);
    }
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit >= units) continue;
      gate_sum += Matrix<W>::dot(gates[i], x + unit, units);
      up_sum += Matrix<W>::dot(ups[i], x + unit, units);
    }
  }
  gate_sum = warp_sum(gate_sum);
  up_sum = warp_sum(up_sum);
  if (lane == 0) store(&out.inner[place * p.inner + row], silu(gate_sum) * up_sum);
}

// grid: (hidden / kWarps, tokens)
template <class T, class W>
__global__ void __launch_bounds__(kWarps * kWarpSize) contract_token(SparseMoEParams p) {
  SHARED_MEMORY(float4, inner);
  SHARED_ARRAY(int, experts, [kMaxTopK]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int row = blockIdx.x * kWarps + warp, token = blockIdx.y;
  const int units = p.inner / Matrix<W>::kUnit, all_units = p.top_k * units;
  const TokenWorkspace from = token_workspace(p);
  if (int(threadIdx.x) < p.top_k) experts[threadIdx.x] = load(&from.experts[token * p.top_k + threadIdx.x]);
  // The experts' vectors one after the other, each times its weight: one long product.
  for (int i = threadIdx.x; i < p.top_k * p.inner; i += blockDim.x) {
    const float weight = load(&from.weights[token * p.top_k + i / p.inner]);
    place_value<W>(inner, all_units, i, weight * load(&from.inner[size_t(token) * p.top_k * p.inner + i]));
  }
  __syncthreads();
  if (row >= p.hidden) return;
  float sum = 0.0f;
  for (int first = lane; first < all_units; first += kInFlight * kWarpSize) {
    typename Matrix<W>::Loaded loaded[kInFlight];
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit < all_units) loaded[i] = down<W>(p, experts[unit / units]).load(row, unit % units);
    }
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit < all_units) sum += Matrix<W>::dot(loaded[i], inner + unit, all_units);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) store(static_cast<T*>(p.y) + size_t(token) * p.hidden + row, sum);
}

template <class T, class W>
Status launch_per_token(const SparseMoEParams& p) {
  const dim3 threads(kWarps * kWarpSize);
  const dim3 expand_grid((p.inner + kWarps - 1) / kWarps, p.top_k, p.tokens);
  const Status status = launch(expand_token<T, W>, expand_grid, threads, p.hidden * sizeof(float), p.stream, p);
  if (!status) return status;
  const dim3 contract_grid((p.hidden + kWarps - 1) / kWarps, p.tokens);
  return launch(contract_token<T, W>, contract_grid, threads, p.top_k * p.inner * sizeof(float), p.stream, p);
}

}  // namespace flashnext::sparse_moe
