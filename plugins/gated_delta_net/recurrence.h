// The gated delta rule on a state that lives in registers.
//
//     S <- exp(decay) * S;  e = v - S^T k;  S <- S + beta * k e^T;  y = S^T q
//
// Columns of S do not depend on each other. A warp owns eight of them and all rows, so its sums over rows need no barrier:
// a lane holds four neighbouring columns of every 16th row, two lanes read a row's 32 bytes. Both products with S come
// from one pass over it, because y = (decayed S)^T q + beta (k . q) e.
#pragma once

#include "gated_delta_net/staging.h"

namespace flashnext::gated_delta_net {

constexpr int kWarpColumns = 8;
constexpr int kLaneColumns = 4;
constexpr int kRowLanes = 16;

// Rows: 16 * Slices at least key_dim.
template <int Slices>
struct State {
  float at[Slices][kLaneColumns];
};

__device__ __forceinline__ int state_row(int slice) {
  return slice * kRowLanes + threadIdx.x % kWarpSize / (kWarpColumns / kLaneColumns);
}

__device__ __forceinline__ int state_column() {
  const int lane = threadIdx.x % kWarpSize;
  return threadIdx.x / kWarpSize * kWarpColumns + lane % (kWarpColumns / kLaneColumns) * kLaneColumns;
}

template <class U>
__device__ __forceinline__ U* state_place(const GatedDeltaNetParams& p, const Head& head, int row) {
  return state_of<U>(p, head) + size_t(row) * p.value_dim + state_column();
}

template <class U, int Slices>
__device__ __forceinline__ void load_state(const GatedDeltaNetParams& p, const Head& head, State<Slices>& state) {
  const bool fresh = head.past <= head.kept;  // nothing was committed before the pending tokens
  UNROLL
  for (int i = 0; i < Slices; i++) {
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!fresh && state_row(i) < p.key_dim) values = load_four(state_place<U>(p, head, state_row(i)));
    state.at[i][0] = values.x;
    state.at[i][1] = values.y;
    state.at[i][2] = values.z;
    state.at[i][3] = values.w;
  }
}

template <class U, int Slices>
__device__ __forceinline__ void store_state(const GatedDeltaNetParams& p, const Head& head, const State<Slices>& state) {
  UNROLL
  for (int i = 0; i < Slices; i++) {
    if (state_row(i) >= p.key_dim) continue;
    const float* s = state.at[i];
    store_four(state_place<U>(p, head, state_row(i)), make_float4(s[0], s[1], s[2], s[3]));
  }
}

// Over the lanes that hold the other rows of the same columns.
__device__ __forceinline__ float sum_rows(float value) {
  for (int by = kWarpColumns / kLaneColumns; by < kWarpSize; by *= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

// One staged token. With Output, `y` gets its four columns (in every lane that holds them).
template <bool Output, int Slices>
__device__ __forceinline__ void apply_token(const GatedDeltaNetParams& p, const Staged& staged, int t,
                                            State<Slices>& state, float (&y)[kLaneColumns]) {
  const float decay = expf(staged.decay[t]), beta = staged.beta[t];
  float key[Slices], from_key[kLaneColumns] = {}, from_query[kLaneColumns] = {};
  UNROLL
  for (int i = 0; i < Slices; i++) {
    const bool inside = state_row(i) < p.key_dim;
    key[i] = inside ? staged.k[t][state_row(i)] : 0.0f;
    const float query = Output && inside ? staged.q[t][state_row(i)] : 0.0f;
    UNROLL
    for (int j = 0; j < kLaneColumns; j++) {
      state.at[i][j] *= decay;
      from_key[j] += state.at[i][j] * key[i];
      if (Output) from_query[j] += state.at[i][j] * query;
    }
  }
  UNROLL
  for (int j = 0; j < kLaneColumns; j++) {
    const float error = beta * (staged.v[t][state_column() + j] - sum_rows(from_key[j]));
    if (Output) y[j] = sum_rows(from_query[j]) + staged.key_query[t] * error;
    UNROLL
    for (int i = 0; i < Slices; i++) state.at[i][j] += key[i] * error;
  }
}

}  // namespace flashnext::gated_delta_net
