// The residual state as the ops that write it see it: R' = R + s * y in float, whatever R is stored in.
#pragma once

#include "common/memory.h"

namespace flashnext {

constexpr float kLargestE4M3 = 448.0f;

// Either `embedding` (every branch is the token's embedding) or `r`, with a pending write where `y` is given.
struct Residual {
  const void* embedding;       // [tokens, hidden]
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
  return {p.embedding, p.r, p.y, p.s, p.r_scale, p.r_token_scale, p.branches, p.hidden};
}

__device__ __forceinline__ float read_scale(const Residual& p, int token, int branch) {
  if (p.r_token_scale) return load(&p.r_token_scale[token * p.branches + branch]);
  return p.r_scale ? load(&p.r_scale[branch]) : 1.0f;
}

// Product and sum are rounded one by one, as PyTorch does it: then stored FP8 values equal the reference's bit for bit.
__device__ __forceinline__ float written(float r, float s, float y) { return r + __fmul_rn(s, y); }

template <class T, class R>
__device__ __forceinline__ Chunk new_state(const Residual& p, int token, int branch, int column) {
  const size_t row = size_t(token) * p.hidden + column;
  if (p.embedding) return load_chunk(static_cast<const T*>(p.embedding) + row);
  const size_t place = (size_t(token) * p.branches + branch) * p.hidden + column;
  Chunk state = load_chunk(static_cast<const R*>(p.r) + place);
  const float scale = read_scale(p, token, branch);
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] *= scale;
  if (!p.y) return state;
  const Chunk y = load_chunk(static_cast<const T*>(p.y) + row);
  const float s = load(&p.s[token * p.branches + branch]);
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] = written(state.at[i], s, y.at[i]);
  return state;
}

// One column of it.
template <class T, class R>
__device__ __forceinline__ float new_state_value(const Residual& p, int token, int branch, int column) {
  const size_t row = size_t(token) * p.hidden + column;
  if (p.embedding) return load(static_cast<const T*>(p.embedding) + row);
  const size_t place = (size_t(token) * p.branches + branch) * p.hidden + column;
  const float r = load(static_cast<const R*>(p.r) + place) * read_scale(p, token, branch);
  if (!p.y) return r;
  return written(r, load(&p.s[token * p.branches + branch]), load(static_cast<const T*>(p.y) + row));
}

}  // namespace flashnext
