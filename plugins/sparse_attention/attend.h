// Softmax attention over the chosen tokens, in parts that run at once, and their merge with the output gate.
//
// A block of threads takes one key head of one query, whose heads it normalises and rotates (a warp each: some hundred
// instructions, less than reading them back), and the tokens of its part, 64 at a time. Four neighbouring threads share a
// token's key, each for a quarter of the query heads; then every thread sums two columns of half the tokens' values for
// all heads. Cached rows are read once per key head and query; weights and sums are float, parts are merged in order.
//
// Parts are kept as means in the activations' format. In float, or with 32 tokens, they would add a quarter to the
// bytes that decoding touches; rounding them costs no more than rounding the output does.
#pragma once

#include "common/math.h"
#include "common/reduce.h"
#include "sparse_attention/queries.h"

namespace flashnext::sparse_attention {

constexpr int kKeyThreads = 4;  // per token
constexpr int kAttendThreads = kSplitTokens * kKeyThreads;
constexpr int kThreadHeads = kMaxGroup / kKeyThreads;
constexpr int kColumnThreads = kMaxHeadDim / 2;
constexpr int kTokenGroups = kAttendThreads / kColumnThreads;  // that sum values side by side
constexpr int kQueryStride = kMaxHeadDim + 4;  // rows start in different banks

struct AttendShared {
  float query[kMaxGroup][kQueryStride];  // at the end: sums of the second group of tokens
  float weight[kSplitTokens][kMaxGroup];  // scores, then their exponentials
  float largest[kMaxGroup], sum[kMaxGroup], decay[kMaxGroup];
  int position[kSplitTokens];  // -1: no token
};

// The tokens that a query sees, numbered: those of the chosen blocks, then the tail.
struct Visible {
  const int* chosen;
  int blocks, tail_start, count;
};

__device__ __forceinline__ Visible visible_tokens(const SparseAttentionParams& p, const Query& query) {
  Visible found;
  if (p.blocks) {
    found.chosen = p.blocks + size_t(query.row) * p.budget_blocks;
    found.blocks = p.budget_blocks;
    found.tail_start = load(&p.blocks_len[query.row]) / p.block * p.block;
  } else {
    const int complete = complete_blocks(p, query);
    found.chosen = workspace(p).chosen + token_place(p, query) * p.budget_blocks;
    found.blocks = complete < p.budget_blocks ? complete : p.budget_blocks;
    found.tail_start = complete * p.block;
  }
  found.count = found.blocks * p.block + max(0, query.position + 1 - found.tail_start);
  return found;
}

__device__ __forceinline__ int position_of(const SparseAttentionParams& p, const Visible& visible, int number) {
  if (number >= visible.count) return -1;
  const int place = number / p.block;
  if (place >= visible.blocks) return visible.tail_start + number - visible.blocks * p.block;
  const int block = load(&visible.chosen[place]);
  return block < 0 ? -1 : block * p.block + number % p.block;
}

template <class C>
__device__ __forceinline__ const C* cached(const SparseAttentionParams& p, const void* cache, int slot, int position,
                                           int kv_head) {
  const size_t token = size_t(slot) * p.tokens + position;
  return static_cast<const C*>(cache) + (token * p.kv_heads + kv_head) * p.head_dim;
}

// Scores of the tokens whose positions are in shared memory.
template <class C>
__device__ __forceinline__ void score_tokens(const SparseAttentionParams& p, int slot, int kv_head, int group,
                                             AttendShared& shared) {
  const int token = threadIdx.x / kKeyThreads, first_head = threadIdx.x % kKeyThreads * kThreadHeads;
  const int position = shared.position[token];
  float scores[kThreadHeads] = {};
  if (position >= 0) {
    const C* key = cached<C>(p, p.key_state, slot, position, kv_head);
    UNROLL
    for (int column = 0; column < kMaxHeadDim; column += kChunk) {
      if (column >= p.head_dim) break;
      const Chunk chunk = load_chunk(key + column);
      UNROLL
      for (int j = 0; j < kThreadHeads; j++) {
        if (first_head + j >= group) continue;
        const float* query = &shared.query[first_head + j][column];
        UNROLL
        for (int i = 0; i < kChunk; i++) scores[j] += chunk.at[i] * query[i];
      }
    }
  }
  const float scale = rsqrtf(float(p.head_dim)) * cache_scale<C>(p.k_scale);
  UNROLL
  for (int j = 0; j < kThreadHeads; j++) {
    shared.weight[token][first_head + j] = position >= 0 ? scores[j] * scale : -INFINITY;
  }
}

// Scores become weights relative to the largest so far; a warp per head, two tokens per lane.
__device__ __forceinline__ void weigh_tokens(int group, AttendShared& shared) {
  const int lane = threadIdx.x % kWarpSize;
  for (int head = threadIdx.x / kWarpSize; head < group; head += kAttendThreads / kWarpSize) {
    float* const low = &shared.weight[lane][head];
    float* const high = &shared.weight[lane + kWarpSize][head];
    const float before = shared.largest[head];
    const float largest = fmaxf(before, warp_max(fmaxf(*low, *high)));
    *low = *low == -INFINITY ? 0.0f : expf(*low - largest);
    *high = *high == -INFINITY ? 0.0f : expf(*high - largest);
    const float sum = warp_sum(*low + *high);
    const float decay = before == -INFINITY ? 0.0f : expf(before - largest);
    __syncwarp();
    if (lane == 0) {
      shared.largest[head] = largest;
      shared.sum[head] = shared.sum[head] * decay + sum;
      shared.decay[head] = decay;
    }
  }
}

template <class C>
__device__ __forceinline__ void add_values(const SparseAttentionParams& p, int slot, int kv_head, int group,
                                           const AttendShared& shared, float2 (&sums)[kMaxGroup]) {
  const int column = 2 * (threadIdx.x % kColumnThreads), token_group = threadIdx.x / kColumnThreads;
  if (column >= p.head_dim) return;
  UNROLL
  for (int head = 0; head < kMaxGroup; head++) {
    if (head >= group) continue;
    sums[head].x *= shared.decay[head];
    sums[head].y *= shared.decay[head];
  }
  for (int token = token_group; token < kSplitTokens; token += kTokenGroups) {
    const int position = shared.position[token];
    if (position < 0) continue;  // its memory may hold anything
    const float2 value = load_pair(cached<C>(p, p.value_state, slot, position, kv_head) + column);
    UNROLL
    for (int head = 0; head < kMaxGroup; head++) {
      if (head >= group) continue;
      sums[head].x += shared.weight[token][head] * value.x;
      sums[head].y += shared.weight[token][head] * value.y;
    }
  }
}

// The first half of the threads gets the sums over all tokens.
__device__ __forceinline__ void join_halves(int group, AttendShared& shared, float2 (&sums)[kMaxGroup]) {
  const int column = 2 * (threadIdx.x % kColumnThreads);
  __syncthreads();
  UNROLL
  for (int head = 0; head < kMaxGroup; head++) {
    if (head >= group || threadIdx.x < kColumnThreads) continue;
    shared.query[head][column] = sums[head].x;
    shared.query[head][column + 1] = sums[head].y;
  }
  __syncthreads();
  UNROLL
  for (int head = 0; head < kMaxGroup; head++) {
    if (head >= group) continue;
    sums[head].x += shared.query[head][column];
    sums[head].y += shared.query[head][column + 1];
  }
}

template <class T, class C>
__device__ __forceinline__ void store_parts(const SparseAttentionParams& p, size_t head_place, int group,
                                            const AttendShared& shared, const float2 (&sums)[kMaxGroup]) {
  const Workspace out = workspace(p);
  const float scale = cache_scale<C>(p.v_scale);
  UNROLL
  for (int head = 0; head < kMaxGroup; head++) {
    if (head >= group) continue;
    const size_t place = (head_place + head) * gridDim.x + blockIdx.x;
    const float sum = shared.sum[head], factor = __fdividef(scale, sum);
    if (threadIdx.x == 0) {
      store(&out.sums[2 * place], shared.largest[head]);
      store(&out.sums[2 * place + 1], sum);
    }
    if (2 * int(threadIdx.x) < p.head_dim && sum > 0.0f) {
      const float2 means = make_float2(sums[head].x * factor, sums[head].y * factor);
      store_pair(static_cast<T*>(out.parts) + place * p.head_dim + 2 * threadIdx.x, means);
    }
  }
}

// grid: (splits, kv_heads, batch * kStepTile)
template <class T, class C>
__global__ void __launch_bounds__(kAttendThreads, 1) attend(SparseAttentionParams p, int first) {
  SHARED_ARRAY(AttendShared, shared_memory_of_block, [1]);
  AttendShared& shared = *shared_memory_of_block;
  allow_next_launch();
  wait_for_previous_launch();
  const Query query = query_at(p, blockIdx.z / kStepTile, first + blockIdx.z % kStepTile);
  if (!query.valid) return;
  const int kv_head = blockIdx.y, group = p.heads / p.kv_heads, splits = gridDim.x;
  const int slot = load(&p.slots[query.row]);
  const Visible visible = visible_tokens(p, query);
  const size_t head_place = tile_place(query, first) * p.heads + kv_head * group;
  for (int head = threadIdx.x / kWarpSize; head < group; head += kAttendThreads / kWarpSize) {
    prepare_query<T>(p, token_place(p, query), query.position, kv_head * group + head, shared.query[head]);
  }
  if (threadIdx.x < kMaxGroup) {
    shared.largest[threadIdx.x] = -INFINITY;
    shared.sum[threadIdx.x] = 0.0f;
  }
  float2 sums[kMaxGroup] = {};
  for (int tile = blockIdx.x; tile * kSplitTokens < visible.count; tile += splits) {
    __syncthreads();
    if (threadIdx.x < kSplitTokens) {
      shared.position[threadIdx.x] = position_of(p, visible, tile * kSplitTokens + threadIdx.x);
    }
    __syncthreads();
    score_tokens<C>(p, slot, kv_head, group, shared);
    __syncthreads();
    weigh_tokens(group, shared);
    __syncthreads();
    add_values<C>(p, slot, kv_head, group, shared, sums);
  }
  join_halves(group, shared, sums);
  store_parts<T, C>(p, head_place, group, shared, sums);
}

// grid: (heads, batch * kStepTile), a thread per column
template <class T>
__global__ void __launch_bounds__(kMaxHeadDim, 1) merge(SparseAttentionParams p, int first, int splits) {
  allow_next_launch();
  wait_for_previous_launch();
  const Query query = query_at(p, blockIdx.y / kStepTile, first + blockIdx.y % kStepTile);
  const int head = blockIdx.x, column = threadIdx.x;
  if (query.step >= p.steps || column >= p.head_dim) return;
  const size_t token = token_place(p, query) * p.heads + head;
  T* y = static_cast<T*>(p.y) + token * p.head_dim + column;
  if (!query.valid) return store(y, 0.0f);
  const Workspace from = workspace(p);
  const size_t place = (tile_place(query, first) * p.heads + head) * splits;
  float largest = -INFINITY;
  for (int i = 0; i < splits; i++) largest = fmaxf(largest, load(&from.sums[2 * (place + i)]));
  float sum = 0.0f, value = 0.0f;
  for (int i = 0; i < splits; i++) {
    const float weights = load(&from.sums[2 * (place + i) + 1]);
    if (weights == 0.0f) continue;
    const float weight = weights * expf(load(&from.sums[2 * (place + i)]) - largest);
    sum += weight;
    value += weight * load(static_cast<const T*>(from.parts) + (place + i) * p.head_dim + column);
  }
  const float gate = load(static_cast<const T*>(p.q_gate) + (2 * token + 1) * p.head_dim + column);
  store(y, __fdividef(value, sum) * sigmoid(gate));
}

}  // namespace flashnext::sparse_attention
