// The residual state as the ops that write it see it: R' = R + s * y in float, whatever R is stored in; and its store
// in FP8, bit for bit as export/ops/reference/residual_store.py has it.
//
// Products and sums are rounded one by one, as PyTorch does it: a fused multiply-add would store other codes.
#pragma once

#include "common/memory.h"

namespace flashnext {

constexpr float kLargestE4M3 = 448.0f;

// One of `embedding` (every branch is the token's embedding), `start` (branches as a draft layer begins with them) and
// `r`, this with a pending write where `y` is given.
struct Residual {
  const void* embedding;       // [tokens, hidden]
  const void* start;           // [tokens, branches, hidden]
  const void* r;               // [tokens, branches, hidden]
  const void* y;               // [tokens, hidden]
  const float* s;              // [tokens, branches]
  const float* r_scale;        // [branches]: what multiplies an FP8 state's codes, or null
  const float* r_token_scale;  // [tokens, branches]: the same, one per token, or null
  int branches, hidden;
};

// Of an op's parameter struct, whose fields have the same names.
template <class Params>
__device__ __forceinline__ Residual residual_of(const Params& p) {
  const void* start = nullptr;
  if constexpr (requires { p.start; }) start = p.start;
  return {p.embedding, start, p.r, p.y, p.s, p.r_scale, p.r_token_scale, p.branches, p.hidden};
}

__device__ __forceinline__ float read_scale(const Residual& p, int token, int branch) {
  if (p.r_token_scale) return load(&p.r_token_scale[token * p.branches + branch]);
  return p.r_scale ? load(&p.r_scale[branch]) : 1.0f;
}

__device__ __forceinline__ float written(float r, float s, float y) { return r + __fmul_rn(s, y); }

// Eight columns as they lie in memory, so that they can be loaded long before they are used: of what is stored in T
// (the same for all branches, but for a `start`) …
template <class T>
__device__ __forceinline__ Packed<T> load_row(const Residual& p, int token, int branch, int column) {
  const size_t row = size_t(token) * p.hidden + column;
  const size_t place = (size_t(token) * p.branches + branch) * p.hidden + column;
  if (p.start) return load_packed(static_cast<const T*>(p.start) + place);
  if (p.embedding) return load_packed(static_cast<const T*>(p.embedding) + row);
  return p.y ? load_packed(static_cast<const T*>(p.y) + row) : Packed<T>{};
}

// … and of the stored state.
template <class R>
__device__ __forceinline__ Packed<R> load_stored(const Residual& p, int token, int branch, int column) {
  if (!p.r) return {};
  return load_packed(static_cast<const R*>(p.r) + (size_t(token) * p.branches + branch) * p.hidden + column);
}

// What multiplies them, one of each per token and branch.
struct WriteFactors {
  float scale, s;
};

__device__ __forceinline__ WriteFactors write_factors(const Residual& p, int token, int branch) {
  return {p.r ? read_scale(p, token, branch) : 1.0f, p.y ? load(&p.s[token * p.branches + branch]) : 0.0f};
}

template <class T, class R>
__device__ __forceinline__ Chunk state_of(const Residual& p, const Packed<T>& row, const Packed<R>& stored,
                                          const WriteFactors& factors) {
  if (!p.r) return unpack(row);
  Chunk state = unpack(stored);
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] = __fmul_rn(state.at[i], factors.scale);
  if (!p.y) return state;
  const Chunk y = unpack(row);
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] = written(state.at[i], factors.s, y.at[i]);
  return state;
}

template <class T, class R>
__device__ __forceinline__ Chunk new_state(const Residual& p, int token, int branch, int column) {
  const Packed<T> row = load_row<T>(p, token, branch, column);
  const Packed<R> stored = load_stored<R>(p, token, branch, column);
  return state_of<T, R>(p, row, stored, write_factors(p, token, branch));
}

// One column of it.
template <class T, class R>
__device__ __forceinline__ float new_state_value(const Residual& p, int token, int branch, int column) {
  const size_t row = size_t(token) * p.hidden + column;
  if (p.embedding) return load(static_cast<const T*>(p.embedding) + row);
  const size_t place = (size_t(token) * p.branches + branch) * p.hidden + column;
  if (p.start) return load(static_cast<const T*>(p.start) + place);
  const float r = __fmul_rn(load(static_cast<const R*>(p.r) + place), read_scale(p, token, branch));
  if (!p.y) return r;
  return written(r, load(&p.s[token * p.branches + branch]), load(static_cast<const T*>(p.y) + row));
}

// --- the store in FP8 -------------------------------------------------------------------------------

constexpr float kSmallestNormal = 0x1p-126f, kLargestFloat = 0x1.fffffep127f;
constexpr int kMantissaBits = 3, kLeastExponent = -6, kKeyBranches = 256;  // of E4M3; of a key
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// What an FP8 branch with this largest magnitude is stored in multiples of; 1 for a branch of zeros.
__device__ __forceinline__ float dynamic_scale(float largest) {
  return largest > 0.0f ? fmaxf(fminf(largest, kLargestFloat) / kLargestE4M3, kSmallestNormal) : 1.0f;
}

__device__ __forceinline__ uint64_t splitmix64(uint64_t x) {
  x += kGolden;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// How a branch's quotients are rounded before they are stored: by the conversion (to nearest), or before it, drawn by a
// hash of seed, site, position, branch and column.
struct Rounding {
  bool stochastic;
  uint64_t row;  // hash of all but the column
};

template <class Params>
__device__ __forceinline__ Rounding rounding_of(const Params& p, int token, int branch) {
  if (!p.positions) return {};
  const uint64_t store = splitmix64(uint64_t(p.seed) + kGolden * uint64_t(p.site));
  const uint64_t row = uint64_t(load(&p.positions[token])) * kKeyBranches + branch;
  return {true, splitmix64(store + kGolden * row)};
}

// `x` on E4M3's grid: away from zero where the draw is below the fraction of a step that is left. All of it is exact.
__device__ __forceinline__ float rounded_stochastically(float x, uint64_t row, int column) {
  const float magnitude = fabsf(x);
  if (!(magnitude <= kLargestE4M3)) return x;  // the conversion saturates, and keeps NaN
  const float draw = float(splitmix64(row + kGolden * uint64_t(column)) >> 40) * 0x1p-24f;
  const int exponent = int(__float_as_uint(magnitude) >> 23) - 127;
  const int places = kMantissaBits - (exponent > kLeastExponent ? exponent : kLeastExponent);
  const float steps = magnitude * __uint_as_float(uint32_t(127 + places) << 23);
  const float whole = floorf(steps) + (draw < steps - floorf(steps) ? 1.0f : 0.0f);
  return copysignf(whole * __uint_as_float(uint32_t(127 - places) << 23), x);
}

// What `store` is to be given for a value of an FP8 branch.
__device__ __forceinline__ float quotient(float value, float scale, const Rounding& rounding, int column) {
  const float x = value / scale;
  return rounding.stochastic ? rounded_stochastically(x, rounding.row, column) : x;
}

}  // namespace flashnext
