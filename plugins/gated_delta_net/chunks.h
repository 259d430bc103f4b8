// The gated delta rule over chunks of 64 tokens: what its launches hand on to each other in the workspace.
//
// With D[t, s] = exp(decay_{s+1} + … + decay_t), and S the state (here and in all of this, [key_dim, value_dim]) before the
// chunk, the tokens of a chunk follow from each other like this, all of them at once:
//
//     (I + A) N = beta * (V - start K S)          A[t, s] = beta_t D[t, s] k_t . k_s for s < t
//     Y = start * (Q S) + P N                     P[t, s] = D[t, s] q_t . k_s for s <= t
//     S = start_last * S + K^T (end * N)          start_t = D from before the chunk to t, end_t = D from t to its last
//
// Three launches: `chunk_local.h` makes Q, K, V, T = (I + A)^-1 and P of all chunks side by side; `chunk_state.h` goes
// through a sequence's chunks one after the other, with a part of S's columns in registers; `chunk_finish.h` normalises.
//
// Operands of tensor cores are BF16. A value goes in as the sum of two BF16 numbers (16 bits of mantissa), a product of
// two as three products; V alone is rounded to one. With single BF16 numbers the rounding of nearly parallel keys adds up
// in S along all directions but theirs, to 5e-2 of its norm over a thousand tokens; rounding T, P or N costs up to 1e-2
// where they cancel, rounding q every token whose q is nearly orthogonal to what S holds. V's rounding stays what it is,
// 2e-3. docs/kernels.md has the table.
#pragma once

#include "common/tensor_tile.h"
#include "gated_delta_net/staging.h"

namespace flashnext::gated_delta_net {

constexpr int kChunkTokens = 64;
constexpr int kBlockTokens = 16;  // upper blocks of triangular matrices are neither stored nor read

// --- workspace --------------------------------------------------------------------------------------

// Of a chunk and key head, each [64, Dk] BF16, Dk being key_dim filled up with zeros.
enum KeyPart { kQueryHigh, kQueryLow, kKeyHigh, kKeyLow, kKeyParts };
// Of a chunk and value head, each [64, 64] BF16.
enum MixPart { kInverseHigh, kInverseLow, kScoresHigh, kScoresLow, kMixParts };
// Of a chunk and value head, each [64] float.
enum GatePart { kStartDecay, kEndDecay, kBeta, kGateParts };

constexpr int kSmallKey = 32;  // kernels are made for keys of up to 32 and of up to 128

__device__ __host__ inline int padded_key_dim(const GatedDeltaNetParams& p) {
  return p.key_dim <= kSmallKey ? kSmallKey : kMaxDim;
}

__device__ __host__ inline int chunk_count(const GatedDeltaNetParams& p) {
  return (p.steps + kChunkTokens - 1) / kChunkTokens;
}

// A chunk of one sequence, and its places in the workspace.
struct Place {
  int row, chunk;

  __device__ __host__ size_t of_keys(const GatedDeltaNetParams& p, int key_head) const {
    return ((size_t(row) * chunk_count(p) + chunk) * p.key_heads + key_head) * kKeyParts * kChunkTokens *
           padded_key_dim(p);
  }
  __device__ __host__ size_t of_values(const GatedDeltaNetParams& p, int value_head) const {
    return ((size_t(row) * chunk_count(p) + chunk) * p.value_heads + value_head) * kChunkTokens;
  }
};

struct Workspace {
  BFloat16 *keys, *mixes, *values;
  float* gates;

  __device__ BFloat16* key_part(const GatedDeltaNetParams& p, Place at, int key_head, int part) const {
    return keys + at.of_keys(p, key_head) + size_t(part) * kChunkTokens * padded_key_dim(p);
  }
  __device__ BFloat16* mix_part(const GatedDeltaNetParams& p, Place at, int value_head, int part) const {
    return mixes + (at.of_values(p, value_head) * kMixParts + size_t(part) * kChunkTokens) * kChunkTokens;
  }
  __device__ BFloat16* value_rows(const GatedDeltaNetParams& p, Place at, int value_head) const {
    return values + at.of_values(p, value_head) * p.value_dim;
  }
  __device__ float* gate_part(const GatedDeltaNetParams& p, Place at, int value_head, int part) const {
    return gates + at.of_values(p, value_head) * kGateParts + part * kChunkTokens;
  }
};

// `bytes`, if given, gets the size of all.
__device__ __host__ inline Workspace workspace_of(const GatedDeltaNetParams& p, int64_t* bytes = nullptr) {
  const Place end{p.batch, 0};  // where the first chunk after the last would begin
  const size_t rows = end.of_values(p, 0), key_bytes = end.of_keys(p, 0) * sizeof(BFloat16);
  const size_t mix_bytes = rows * kMixParts * kChunkTokens * sizeof(BFloat16);
  const size_t value_bytes = rows * p.value_dim * sizeof(BFloat16), gate_bytes = rows * kGateParts * sizeof(float);
  if (bytes) *bytes = int64_t(key_bytes + mix_bytes + value_bytes + gate_bytes);
  auto* at = static_cast<unsigned char*>(p.workspace);
  Workspace found{};
  found.keys = reinterpret_cast<BFloat16*>(at);
  found.mixes = reinterpret_cast<BFloat16*>(at + key_bytes);
  found.values = reinterpret_cast<BFloat16*>(at + key_bytes + mix_bytes);
  found.gates = reinterpret_cast<float*>(at + key_bytes + mix_bytes + value_bytes);
  return found;
}

// --- a float as two BF16 numbers --------------------------------------------------------------------

__device__ __forceinline__ float low_part(float value) { return value - rounded<BFloat16>(value); }

// Two neighbouring accumulators as the A fragments of a further product.
__device__ __forceinline__ void split_accumulators(uint32_t (&high)[4], uint32_t (&low)[4], const float (&left)[4],
                                                   const float (&right)[4]) {
  float left_low[4], right_low[4];
  UNROLL
  for (int i = 0; i < 4; i++) {
    left_low[i] = low_part(left[i]);
    right_low[i] = low_part(right[i]);
  }
  accumulators_as_a(high, left, right);
  accumulators_as_a(low, left_low, right_low);
}

// sums += a * b, without low times low, which is below 2^-16 of the whole.
__device__ __forceinline__ void mma_split(float (&sums)[4], const uint32_t (&a_high)[4], const uint32_t (&a_low)[4],
                                          const uint32_t (&b_high)[2], const uint32_t (&b_low)[2]) {
  mma_bf16(sums, a_low, b_high, sums);
  mma_bf16(sums, a_high, b_low, sums);
  mma_bf16(sums, a_high, b_high, sums);
}

}  // namespace flashnext::gated_delta_net
