// Norm and RoPE of heads; attention prepares its own queries with it, decoding and in tiles alike.
#pragma once

#include "common/rotary.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

__device__ __forceinline__ Rotation rotation_of(const SparseAttentionParams& p) {
  return {p.inv_freq, p.frequencies, p.rope_scale};
}

// A query head at a token (of all sequences') and position, normalised and rotated, by a warp.
template <class T>
__device__ __forceinline__ void prepare_query(const SparseAttentionParams& p, size_t token, int position, int head,
                                              float* buffer) {
  const T* from = static_cast<const T*>(p.q_gate) + (token * p.heads + head) * 2 * p.head_dim;
  const auto source = [&](int i) { return load(from + i); };
  normalise_head(source, static_cast<const T*>(p.q_norm_weight), p.head_dim, p.eps, buffer);
  rotate_head(buffer, position, rotation_of(p));
}

}  // namespace flashnext::sparse_attention
