// Second launch of a long step: one sequence's chunks, one after the other, on a state that stays in registers.
//
// Columns of S do not depend on each other: a warp owns 16 of them, and everything is written transposed, so that they
// are the rows of its products and an accumulator is, as it lies, the operand of the next product. Warps share only the
// operands in shared memory, which come in the background:
//
//     X = S^T K^T;  X = beta (V^T - start X);  N = X T^T;  Y = start (S^T Q^T);  S^T = start_last S^T + (end N) K;
//     Y = Y + N P^T
//
// Each operand has one place, filled again as soon as all warps are through with it; P takes Q's. S goes into K S as one
// BF16 number (its error there is corrected by the rule itself and was not to be seen beside V's), all else as two. Two
// blocks of threads fit an SM of sm_90 and sm_100, one the 99 KB of sm_89 and sm_120.
//
// Y is left in `y`, not normalised: a block of threads has only some of a head's columns.
#pragma once

#include "gated_delta_net/chunks.h"

namespace flashnext::gated_delta_net {

constexpr int kStateThreads = 128;
constexpr int kWarpValues = 16;                                          // columns of S in a warp
constexpr int kBlockValues = kStateThreads / kWarpSize * kWarpValues;    // in a block of threads
constexpr int kTokenTiles = kChunkTokens / 8;                            // accumulators of a [16, 64] matrix

// Columns of S, transposed: [16, Dk] in accumulators. Matrices over the chunk's tokens: [16, 64].
template <int Dk>
struct StateSlice {
  float at[Dk / 8][4];
};
using TokenSlice = float[kTokenTiles][4];

// What lies in shared memory.
template <int Dk>
struct Operands {
  static constexpr int kHalf = kChunkTokens * (Dk > kChunkTokens ? Dk : kChunkTokens);  // of half of Q, or half of P

  Tile<Dk> key_high, key_low, query_high, query_low;
  Tile<kChunkTokens> inverse_high, inverse_low, scores_high, scores_low;  // T; P, in Q's place
  Tile<kBlockValues> values;                                              // V, then Y
  float* gates;                                                           // [kGateParts][64]

  static constexpr size_t bytes() {
    return 2 * Tile<Dk>::bytes(kChunkTokens) + 2 * kHalf * sizeof(BFloat16) +
           2 * Tile<kChunkTokens>::bytes(kChunkTokens) + Tile<kBlockValues>::bytes(kChunkTokens) +
           kGateParts * kChunkTokens * sizeof(float);
  }
  __device__ explicit Operands(unsigned char* memory) {
    auto* at = reinterpret_cast<BFloat16*>(memory);
    const auto take = [&at](int count) { return at += count, at - count; };
    key_high = {take(kChunkTokens * Dk)};
    key_low = {take(kChunkTokens * Dk)};
    query_high = {take(kHalf)};
    query_low = {take(kHalf)};
    scores_high = {query_high.values};
    scores_low = {query_low.values};
    inverse_high = {take(kChunkTokens * kChunkTokens)};
    inverse_low = {take(kChunkTokens * kChunkTokens)};
    values = {take(kChunkTokens * kBlockValues)};
    gates = reinterpret_cast<float*>(at);
  }
  __device__ float2 gate_pair(int part, int token) const {
    return *reinterpret_cast<const float2*>(gates + part * kChunkTokens + token);
  }
};

// --- staging ----------------------------------------------------------------------------------------

// A whole matrix [64, Columns], or its blocks on and below the diagonal.
template <bool Lower, int Columns>
__device__ __forceinline__ void stage_matrix(const BFloat16* from, Tile<Columns> tile) {
  constexpr int kUnits = Columns / kChunk;
  NO_UNROLL
  for (int i = threadIdx.x; i < kChunkTokens * kUnits; i += kStateThreads) {
    const int row = i / kUnits, column = i % kUnits * kChunk;
    if (Lower && column / kBlockTokens > row / kBlockTokens) continue;
    copy_async(tile.at(row, column), from + i * kChunk);
  }
}

// Q or K of a chunk: `part` is kQueryHigh or kKeyHigh.
template <int Dk>
__device__ __forceinline__ void stage_keys(const GatedDeltaNetParams& p, const Head& head, int chunk, int part,
                                           Tile<Dk> high, Tile<Dk> low) {
  const BFloat16* from = workspace_of(p).key_part(p, {head.row, chunk}, head.key_head, part);
  stage_matrix<false>(from, high);
  stage_matrix<false>(from + kChunkTokens * Dk, low);
  commit_copies();
}

// T or P of a chunk: `part` is kInverseHigh or kScoresHigh.
__device__ __forceinline__ void stage_mix(const GatedDeltaNetParams& p, const Head& head, int chunk, int part,
                                          Tile<kChunkTokens> high, Tile<kChunkTokens> low) {
  const BFloat16* from = workspace_of(p).mix_part(p, {head.row, chunk}, head.value_head, part);
  stage_matrix<true>(from, high);
  stage_matrix<true>(from + kChunkTokens * kChunkTokens, low);
  commit_copies();
}

template <int Dk>
__device__ __forceinline__ void stage_values(const GatedDeltaNetParams& p, const Head& head, int chunk, int column,
                                             const Operands<Dk>& operands) {
  const Place at{head.row, chunk};
  const BFloat16* from = workspace_of(p).value_rows(p, at, head.value_head) + column;
  stage_rows<kStateThreads>(operands.values, kChunkTokens, p.value_dim - column,
                            [&](int t) { return from + size_t(t) * p.value_dim; });
  const float* gates = workspace_of(p).gate_part(p, at, head.value_head, 0);
  for (int i = 4 * threadIdx.x; i < kGateParts * kChunkTokens; i += 4 * kStateThreads) {
    copy_async(operands.gates + i, gates + i);
  }
  commit_copies();
}

// --- the state in memory ----------------------------------------------------------------------------

template <class U>
__device__ __forceinline__ U* slice_place(const GatedDeltaNetParams& p, const Head& head, int row, int column) {
  return state_of<U>(p, head) + size_t(row) * p.value_dim + column;
}

template <class U, int Dk>
__device__ __forceinline__ void load_slice(const GatedDeltaNetParams& p, const Head& head, int first,
                                           StateSlice<Dk>& state) {
  UNROLL
  for (int n = 0; n < Dk / 8; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int row = 8 * n + accumulator_column(i), column = first + accumulator_row(i);
      const bool there = head.past > head.kept && row < p.key_dim && column < p.value_dim;
      state.at[n][i] = there ? load(slice_place<U>(p, head, row, column)) : 0.0f;
    }
  }
}

template <class U, int Dk>
__device__ __forceinline__ void store_slice(const GatedDeltaNetParams& p, const Head& head, int first,
                                            const StateSlice<Dk>& state) {
  UNROLL
  for (int n = 0; n < Dk / 8; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int row = 8 * n + accumulator_column(i), column = first + accumulator_row(i);
      if (row < p.key_dim && column < p.value_dim) store(slice_place<U>(p, head, row, column), state.at[n][i]);
    }
  }
}

// The accepted pending tokens, in float.
template <int Dk>
__device__ __forceinline__ void commit_slice(const GatedDeltaNetParams& p, const Head& head, int first,
                                             StateSlice<Dk>& state) {
  for (int t = 0; t < head.kept; t++) {
    const PendingRow row = pending_row(p, head, t);
    const float decay = expf(load(row.decay)), beta = load(row.beta);
    float sums[2] = {};
    UNROLL
    for (int n = 0; n < Dk / 8; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        const int place = 8 * n + accumulator_column(i);
        state.at[n][i] *= decay;
        sums[i / 2] += state.at[n][i] * (place < p.key_dim ? load(row.k + place) : 0.0f);
      }
    }
    float error[2];
    UNROLL
    for (int h = 0; h < 2; h++) {
      const int column = first + accumulator_row(2 * h);
      error[h] = beta * ((column < p.value_dim ? load(row.v + column) : 0.0f) - warp_sum(sums[h], 4));
    }
    UNROLL
    for (int n = 0; n < Dk / 8; n++) {
      UNROLL
      for (int i = 0; i < 4; i++) {
        const int place = 8 * n + accumulator_column(i);
        if (place < p.key_dim) state.at[n][i] += load(row.k + place) * error[i / 2];
      }
    }
  }
}

// --- a chunk's products -----------------------------------------------------------------------------

// x = S^T K^T.
template <int Dk>
__device__ __forceinline__ void project_keys(const Operands<Dk>& operands, const StateSlice<Dk>& state, TokenSlice& x) {
  UNROLL
  for (int k = 0; k < Dk / kMmaDepth; k++) {
    uint32_t rounded_state[4];
    accumulators_as_a(rounded_state, state.at[2 * k], state.at[2 * k + 1]);
    UNROLL
    for (int n = 0; n < kTokenTiles / 2; n++) {
      uint32_t b_high[2][2], b_low[2][2];
      load_b(b_high, operands.key_high.from_row(n * kPair), k * kMmaDepth);
      load_b(b_low, operands.key_low.from_row(n * kPair), k * kMmaDepth);
      UNROLL
      for (int h = 0; h < 2; h++) {
        mma_bf16(x[2 * n + h], rounded_state, b_low[h], x[2 * n + h]);
        mma_bf16(x[2 * n + h], rounded_state, b_high[h], x[2 * n + h]);
      }
    }
  }
}

// y = start (S^T Q^T).
template <int Dk>
__device__ __forceinline__ void project_queries(const Operands<Dk>& operands, const StateSlice<Dk>& state,
                                                TokenSlice& y) {
  UNROLL
  for (int k = 0; k < Dk / kMmaDepth; k++) {
    uint32_t high[4], low[4];
    split_accumulators(high, low, state.at[2 * k], state.at[2 * k + 1]);
    UNROLL
    for (int n = 0; n < kTokenTiles / 2; n++) {
      uint32_t b_high[2][2], b_low[2][2];
      load_b(b_high, operands.query_high.from_row(n * kPair), k * kMmaDepth);
      load_b(b_low, operands.query_low.from_row(n * kPair), k * kMmaDepth);
      UNROLL
      for (int h = 0; h < 2; h++) mma_split(y[2 * n + h], high, low, b_high[h], b_low[h]);
    }
  }
  UNROLL
  for (int n = 0; n < kTokenTiles; n++) {
    const float2 start = operands.gate_pair(kStartDecay, 8 * n + accumulator_column(0));
    UNROLL
    for (int i = 0; i < 4; i++) y[n][i] *= i % 2 ? start.y : start.x;
  }
}

// x = beta (V^T - start x). `column` of the values tile.
template <int Dk>
__device__ __forceinline__ void subtract_from_values(const Operands<Dk>& operands, int column, TokenSlice& x) {
  UNROLL
  for (int n = 0; n < kTokenTiles / 2; n++) {
    uint32_t v[4];  // columns column … + 7 and + 8 … + 15 of eight tokens, then of the next eight
    load_a_transposed(v, operands.values, n * kPair, column);
    UNROLL
    for (int h = 0; h < 2; h++) {
      const int token = n * kPair + 8 * h + accumulator_column(0);
      const float2 start = operands.gate_pair(kStartDecay, token), beta = operands.gate_pair(kBeta, token);
      float(&to)[4] = x[2 * n + h];
      UNROLL
      for (int i = 0; i < 4; i++) {
        const uint32_t pair = v[2 * h + i / 2];
        const float value = __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
        to[i] = (i % 2 ? beta.y : beta.x) * (value - (i % 2 ? start.y : start.x) * to[i]);
      }
    }
  }
}

// out += from M^T, for a lower triangular M.
__device__ __forceinline__ void add_mixed(Tile<kChunkTokens> m_high, Tile<kChunkTokens> m_low, const TokenSlice& from,
                                          TokenSlice& out) {
  UNROLL
  for (int k = 0; k < kTokenTiles / 2; k++) {
    uint32_t high[4], low[4];
    split_accumulators(high, low, from[2 * k], from[2 * k + 1]);
    UNROLL
    for (int n = k; n < kTokenTiles / 2; n++) {
      uint32_t b_high[2][2], b_low[2][2];
      load_b(b_high, m_high.from_row(n * kPair), k * kMmaDepth);
      load_b(b_low, m_low.from_row(n * kPair), k * kMmaDepth);
      UNROLL
      for (int h = 0; h < 2; h++) mma_split(out[2 * n + h], high, low, b_high[h], b_low[h]);
    }
  }
}

// S^T = start_last S^T + (end n) K.
template <int Dk>
__device__ __forceinline__ void update_state(const Operands<Dk>& operands, const TokenSlice& n, StateSlice<Dk>& state) {
  const float whole = operands.gates[kStartDecay * kChunkTokens + kChunkTokens - 1];
  UNROLL
  for (int j = 0; j < Dk / 8; j++) {
    UNROLL
    for (int i = 0; i < 4; i++) state.at[j][i] *= whole;
  }
  UNROLL
  for (int k = 0; k < kTokenTiles / 2; k++) {
    float left[4], right[4];
    const int token = k * kMmaDepth + accumulator_column(0);
    const float2 a = operands.gate_pair(kEndDecay, token), b = operands.gate_pair(kEndDecay, token + 8);
    UNROLL
    for (int i = 0; i < 4; i++) {
      left[i] = n[2 * k][i] * (i % 2 ? a.y : a.x);
      right[i] = n[2 * k + 1][i] * (i % 2 ? b.y : b.x);
    }
    uint32_t high[4], low[4];
    split_accumulators(high, low, left, right);
    UNROLL
    for (int j = 0; j < Dk / kPair; j++) {
      uint32_t b_high[2][2], b_low[2][2];
      load_b_transposed(b_high, operands.key_high, k * kMmaDepth, j * kPair);
      load_b_transposed(b_low, operands.key_low, k * kMmaDepth, j * kPair);
      UNROLL
      for (int h = 0; h < 2; h++) mma_split(state.at[2 * j + h], high, low, b_high[h], b_low[h]);
    }
  }
}

// y [16, 64] through this warp's columns of the values tile, which nobody needs any more, to rows of 16 values.
template <int Dk>
__device__ __forceinline__ void write_heads(const GatedDeltaNetParams& p, const Head& head, int chunk, int first,
                                            const Operands<Dk>& operands, const TokenSlice& y) {
  const int lane = threadIdx.x % kWarpSize, column = first % kBlockValues;
  UNROLL
  for (int n = 0; n < kTokenTiles; n++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      *operands.values.at(8 * n + accumulator_column(i), column + accumulator_row(i)) = from_float<BFloat16>(y[n][i]);
    }
  }
  __syncwarp();
  const int part = lane % 2 * kChunk;
  for (int t = lane / 2; t < kChunkTokens; t += kWarpSize / 2) {
    const int token = chunk * kChunkTokens + t;
    if (token >= head.count || first + part >= p.value_dim) continue;
    const size_t place = (size_t(head.row) * p.steps + token) * p.value_heads + head.value_head;
    const auto values = *reinterpret_cast<const Packed<BFloat16>*>(operands.values.at(t, column + part));
    store_packed(static_cast<BFloat16*>(p.y) + place * p.value_dim + first + part, values);
  }
}

// --- the kernel -------------------------------------------------------------------------------------

// One chunk; K and T of it are there, or on their way. `first` column of S in the head.
template <int Dk>
__device__ __forceinline__ void advance(const GatedDeltaNetParams& p, const Head& head, int chunk, bool last, int first,
                                        const Operands<Dk>& operands, StateSlice<Dk>& state) {
  const bool inside = first < p.value_dim;  // all of the warp
  TokenSlice x = {}, y = {}, n = {};
  wait_for_copies<0>();
  __syncthreads();  // K and T are there, all else is free
  stage_values(p, head, chunk, first / kBlockValues * kBlockValues, operands);
  stage_keys(p, head, chunk, kQueryHigh, operands.query_high, operands.query_low);
  if (inside) project_keys(operands, state, x);
  wait_for_copies<1>();
  __syncthreads();  // V is there
  if (inside) subtract_from_values(operands, first % kBlockValues, x);
  if (inside) add_mixed(operands.inverse_high, operands.inverse_low, x, n);
  wait_for_copies<0>();
  __syncthreads();  // Q is there, T is free
  if (!last) stage_mix(p, head, chunk + 1, kInverseHigh, operands.inverse_high, operands.inverse_low);
  if (inside) project_queries(operands, state, y);
  __syncthreads();  // Q is free
  stage_mix(p, head, chunk, kScoresHigh, operands.scores_high, operands.scores_low);
  if (inside) update_state(operands, n, state);
  wait_for_copies<0>();
  __syncthreads();  // P is there, K is free
  if (!last) stage_keys(p, head, chunk + 1, kKeyHigh, operands.key_high, operands.key_low);
  if (!inside) return;
  add_mixed(operands.scores_high, operands.scores_low, n, y);
  write_heads(p, head, chunk, first, operands, y);
}

// The head that a block works for. Called again where registers for what it says would have to be kept for long.
__device__ __forceinline__ Head state_head(const GatedDeltaNetParams& p) {
  return head_of(p, anew(blockIdx.x) / (gridDim.x / p.value_heads), anew(blockIdx.y));
}

// This warp's first column of S.
__device__ __forceinline__ int first_column(const GatedDeltaNetParams& p) {
  const int part = anew(blockIdx.x) % (gridDim.x / p.value_heads);
  return part * kBlockValues + anew(threadIdx.x) / kWarpSize * kWarpValues;
}

template <int Dk>
__device__ __forceinline__ void all_chunks(const GatedDeltaNetParams& p, const Head& head, const Operands<Dk>& operands,
                                           StateSlice<Dk>& state) {
  const int chunks = (head.count + kChunkTokens - 1) / kChunkTokens;
  for (int chunk = 0; chunk < chunks; chunk++) {
    advance(p, head, anew(chunk), chunk + 1 == chunks, first_column(p), operands, state);
  }
}

template <class U, int Dk>
__global__ void __launch_bounds__(kStateThreads, 2) chunk_state(GatedDeltaNetParams p) {
  SHARED_MEMORY(unsigned char, memory);
  allow_next_launch();
  wait_for_previous_launch();
  const Head head = state_head(p);
  if (head.count == 0) return;
  const Operands<Dk> operands(memory);
  stage_keys(p, head, 0, kKeyHigh, operands.key_high, operands.key_low);
  stage_mix(p, head, 0, kInverseHigh, operands.inverse_high, operands.inverse_low);
  StateSlice<Dk> state;
  load_slice<U>(p, head, first_column(p), state);
  commit_slice(p, head, first_column(p), state);
  all_chunks(p, head, operands, state);
  const Head again = state_head(p);
  store_slice<U>(p, again, first_column(p), state);
  if (first_column(p) < kBlockValues) keep_conv_inputs<BFloat16>(p, again, max(0, again.count - p.ring));
}

}  // namespace flashnext::gated_delta_net
