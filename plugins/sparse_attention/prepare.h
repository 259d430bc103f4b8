// First launch: norms and RoPE of keys and index queries; the caches take the step's tokens. (Attention prepares its
// queries itself.)
//
// A warp per head of a token. Index keys are kept raw in a ring; the token that completes a block also pools it: mean
// of its raw keys in float, norm, RoPE at the block's first position.
#pragma once

#include "sparse_attention/queries.h"

namespace flashnext::sparse_attention {

constexpr int kPrepareWarps = 8;

__device__ __host__ inline int head_tasks(const SparseAttentionParams& p) {
  return 2 * p.kv_heads + (p.index_qk ? p.index_heads + 1 : 0);
}

// Whether the ring has room for the step's raw keys beside those that are still read.
__device__ __host__ inline bool ring_has_room(const SparseAttentionParams& p) {
  return p.ring >= p.steps + p.block - 1;
}

template <class C>
__device__ __forceinline__ C* cache_place(const SparseAttentionParams& p, void* cache, const Query& at, int head) {
  const size_t token = size_t(load(&p.slots[at.row])) * p.tokens + at.position;
  return static_cast<C*>(cache) + (token * p.kv_heads + head) * p.head_dim;
}

// A value as the cache stores it. The quotient is the rounded one, so that codes are those of the reference.
template <class C>
__device__ __forceinline__ float in_cache(float value, float scale) {
  return std::is_same_v<C, Float8E4M3> ? value / scale : value;
}

template <class T, class C>
__device__ __forceinline__ void prepare_key(const SparseAttentionParams& p, const Query& at, int head, float* buffer) {
  const T* from = static_cast<const T*>(p.k) + (token_place(p, at) * p.kv_heads + head) * p.head_dim;
  C* out = cache_place<C>(p, p.key_state, at, head);
  const float scale = cache_scale<C>(p.k_scale);
  const auto source = [&](int i) { return load(from + i); };
  normalise_head(source, static_cast<const T*>(p.k_norm_weight), p.head_dim, p.eps, buffer);
  rotate_head(buffer, at.position, rotation_of(p));
  for (int i = threadIdx.x % kWarpSize; i < p.head_dim; i += kWarpSize) store(out + i, in_cache<C>(buffer[i], scale));
}

template <class T, class C>
__device__ __forceinline__ void keep_value(const SparseAttentionParams& p, const Query& at, int head) {
  const T* from = static_cast<const T*>(p.v) + (token_place(p, at) * p.kv_heads + head) * p.head_dim;
  C* out = cache_place<C>(p, p.value_state, at, head);
  const float scale = cache_scale<C>(p.v_scale);
  for (int i = threadIdx.x % kWarpSize; i < p.head_dim; i += kWarpSize) {
    store(out + i, in_cache<C>(load(from + i), scale));
  }
}

// Head `head` of index_qk at a token of the step; the key is the one after the queries.
template <class T>
__device__ __forceinline__ const T* index_head(const SparseAttentionParams& p, size_t token, int head) {
  return static_cast<const T*>(p.index_qk) + (token * (p.index_heads + 1) + head) * p.index_head_dim;
}

template <class T>
__device__ __forceinline__ void prepare_index_query(const SparseAttentionParams& p, const Query& at, int head,
                                                    float* buffer) {
  if (on_tensor_cores(p) && complete_blocks(p, at) <= p.budget_blocks) return;  // nothing is scored for it
  const T* from = index_head<T>(p, token_place(p, at), head);
  float* out = workspace(p).index_query + (token_place(p, at) * p.index_heads + head) * p.index_head_dim;
  const auto source = [&](int i) { return load(from + i); };
  normalise_head(source, static_cast<const T*>(p.index_q_norm_weight), p.index_head_dim, p.eps, buffer);
  rotate_head(buffer, at.position, rotation_of(p));
  for (int i = threadIdx.x % kWarpSize; i < p.index_head_dim; i += kWarpSize) store(out + i, buffer[i]);
}

template <class T>
__device__ __forceinline__ T* tail_place(const SparseAttentionParams& p, const Query& at, int position) {
  const size_t row = size_t(load(&p.slots[at.row])) * p.ring + position % p.ring;
  return static_cast<T*>(p.index_tail_state) + row * p.index_head_dim;
}

template <class T>
__device__ __forceinline__ void keep_index_key(const SparseAttentionParams& p, const Query& at) {
  const T* from = index_head<T>(p, token_place(p, at), p.index_heads);
  T* out = tail_place<T>(p, at, at.position);
  for (int i = threadIdx.x % kWarpSize; i < p.index_head_dim; i += kWarpSize) store(out + i, load(from + i));
}

template <class T>
__device__ __forceinline__ void pool_block(const SparseAttentionParams& p, const Query& at, float* buffer) {
  if ((at.position + 1) % p.block) return;
  const int past = at.position - at.step, first = at.position + 1 - p.block;
  const auto source = [&](int i) {
    float sum = 0.0f;
    for (int position = first; position <= at.position; position++) {
      const int step = position - past;
      const T* from = step >= 0 ? index_head<T>(p, size_t(at.row) * p.steps + step, p.index_heads)
                                : tail_place<T>(p, at, position);
      sum += load(from + i);
    }
    return sum / p.block;
  };
  normalise_head(source, static_cast<const T*>(p.index_k_norm_weight), p.index_head_dim, p.eps, buffer);
  const size_t row = size_t(load(&p.slots[at.row])) * p.index_blocks + first / p.block;
  T* out = static_cast<T*>(p.index_key_state) + row * p.index_head_dim;
  rotate_head(buffer, first, rotation_of(p));
  for (int i = threadIdx.x % kWarpSize; i < p.index_head_dim; i += kWarpSize) store(out + i, buffer[i]);
}

// grid: (batch * steps * tasks / kPrepareWarps)
template <class T, class C>
__global__ void __launch_bounds__(kPrepareWarps * kWarpSize, 1) prepare(SparseAttentionParams p) {
  SHARED_ARRAY(float, buffers, [kPrepareWarps][kMaxHeadDim]);
  allow_next_launch();
  wait_for_previous_launch();
  const int64_t number = int64_t(blockIdx.x) * kPrepareWarps + threadIdx.x / kWarpSize;
  const int token = int(number / head_tasks(p));
  if (token >= p.batch * p.steps) return;
  const Query at = query_at(p, token / p.steps, token % p.steps);
  if (!at.valid) return;
  float* buffer = buffers[threadIdx.x / kWarpSize];
  int task = int(number % head_tasks(p));
  if (task < p.kv_heads) return prepare_key<T, C>(p, at, task, buffer);
  task -= p.kv_heads;
  if (task < p.kv_heads) return keep_value<T, C>(p, at, task);
  task -= p.kv_heads;
  if (task < p.index_heads) return prepare_index_query<T>(p, at, task, buffer);
  pool_block<T>(p, at, buffer);
  if (ring_has_room(p)) keep_index_key<T>(p, at);
}

// The ring's part of a long step, once nobody reads the old keys any more: its last `ring` tokens.
// grid: (ring, batch)
template <class T>
__global__ void __launch_bounds__(kWarpSize) keep_ring(SparseAttentionParams p) {
  allow_next_launch();
  wait_for_previous_launch();
  const int step = load(&p.new_len[blockIdx.y]) - 1 - int(blockIdx.x);
  if (step >= 0) keep_index_key<T>(p, query_at(p, blockIdx.y, step));
}

}  // namespace flashnext::sparse_attention
