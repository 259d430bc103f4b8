// What the recurrence needs of a few tokens, in shared memory: q, k, v, decay and beta of one value head.
//
// New tokens come out of the causal convolution over qkv and the ring of earlier inputs; pending tokens lie ready in
// pending_state. Each key head serves several value heads, whose blocks all compute its q and k: some hundred products
// more, and no block waits for another.
#pragma once

#include "common/math.h"
#include "common/memory.h"
#include "common/reduce.h"
#include "gated_delta_net/params.h"

namespace flashnext::gated_delta_net {

constexpr int kTile = 8;  // tokens staged at a time
constexpr int kMaxDim = 128;
constexpr int kTaps = 4;
constexpr float kUnitEps = 1e-6f;  // of the L2 norms (the model family's fixed value)

struct Staged {
  float q[kTile][kMaxDim], k[kTile][kMaxDim], v[kTile][kMaxDim];
  float decay[kTile];  // log
  float beta[kTile];
  float key_query[kTile];  // k . q
};

// The head that a block works for, and its row's lengths.
struct Head {
  int row, value_head, key_head, heads_per_key;
  int slot, past, kept, count;
  __device__ bool first_of_key() const { return value_head % heads_per_key == 0; }
};

__device__ __forceinline__ Head head_of(const GatedDeltaNetParams& p, int value_head, int row) {
  Head head;
  head.value_head = value_head;
  head.row = row;
  head.heads_per_key = p.value_heads / p.key_heads;
  head.key_head = head.value_head / head.heads_per_key;
  head.slot = load(&p.slots[head.row]);
  head.past = load(&p.past_len[head.row]);
  head.kept = load(&p.accepted[head.row]);
  head.count = load(&p.new_len[head.row]);
  return head;
}

// S of the head, [key_dim, value_dim].
template <class U>
__device__ __forceinline__ U* state_of(const GatedDeltaNetParams& p, const Head& head) {
  const size_t matrix = size_t(head.slot) * p.value_heads + head.value_head;
  return static_cast<U*>(p.recurrent_state) + matrix * p.key_dim * p.value_dim;
}

// Channel of qkv of this block's i-th channel: its q, its k, its v.
__device__ __forceinline__ int channel_of(const GatedDeltaNetParams& p, const Head& head, int i) {
  if (i < p.key_dim) return head.key_head * p.key_dim + i;
  if (i < 2 * p.key_dim) return (p.key_heads + head.key_head) * p.key_dim + i - p.key_dim;
  return 2 * p.key_heads * p.key_dim + head.value_head * p.value_dim + i - 2 * p.key_dim;
}

template <class T>
__device__ __forceinline__ const T* conv_row(const GatedDeltaNetParams& p, const Head& head, int position) {
  if (position >= head.past) {
    const size_t token = size_t(head.row) * p.steps + position - head.past;
    return static_cast<const T*>(p.qkv) + token * p.channels;
  }
  return static_cast<const T*>(p.conv_state) + (size_t(head.slot) * p.ring + position % p.ring) * p.channels;
}

template <class T>
__device__ __forceinline__ float conv_input(const GatedDeltaNetParams& p, const Head& head, int position, int channel) {
  return position < 0 ? 0.0f : load(conv_row<T>(p, head, position) + channel);
}

template <class T>
__device__ __forceinline__ void keep_conv_input(const GatedDeltaNetParams& p, const Head& head, int token, int channel) {
  const size_t place = (size_t(head.slot) * p.ring + (head.past + token) % p.ring) * p.channels + channel;
  store(static_cast<T*>(p.conv_state) + place, conv_input<T>(p, head, head.past + token, channel));
}

// The step's inputs, from its token `first` on, go into the ring: v by every value head, q and k by the key head's first.
template <class T>
__device__ __forceinline__ void keep_conv_inputs(const GatedDeltaNetParams& p, const Head& head, int first) {
  for (int t = first; t < head.count; t++) {
    for (int i = threadIdx.x; i < 2 * p.key_dim + p.value_dim; i += blockDim.x) {
      if (i >= 2 * p.key_dim || head.first_of_key()) keep_conv_input<T>(p, head, t, channel_of(p, head, i));
    }
  }
}

// Tokens first … first + count - 1 of the step, convolved, not yet normalised.
template <class T>
__device__ __forceinline__ void convolve(const GatedDeltaNetParams& p, const Head& head, int first, int count,
                                         Staged& staged) {
  for (int i = threadIdx.x; i < 2 * p.key_dim + p.value_dim; i += blockDim.x) {
    const int channel = channel_of(p, head, i), position = head.past + first;
    float weight[kTaps], input[kTaps];
    UNROLL
    for (int tap = 0; tap < kTaps; tap++) {  // a narrower convolution's missing taps are the oldest
      const int place = tap - (kTaps - p.width);
      weight[tap] = place < 0 ? 0.0f : load(static_cast<const T*>(p.conv_weight) + channel * p.width + place);
    }
    UNROLL
    for (int tap = 1; tap < kTaps; tap++) {
      input[tap] = tap > kTaps - p.width ? conv_input<T>(p, head, position + tap - kTaps, channel) : 0.0f;
    }
    float* out = i < p.key_dim ? staged.q[0] + i
                               : (i < 2 * p.key_dim ? staged.k[0] + i - p.key_dim : staged.v[0] + i - 2 * p.key_dim);
    for (int t = 0; t < count; t++) {
      float sum = 0.0f;
      UNROLL
      for (int tap = 0; tap + 1 < kTaps; tap++) input[tap] = input[tap + 1];
      input[kTaps - 1] = conv_input<T>(p, head, position + t, channel);
      UNROLL
      for (int tap = 0; tap < kTaps; tap++) sum += weight[tap] * input[tap];
      out[t * kMaxDim] = silu(sum);
    }
  }
}

// Unit length for q and k of every staged token, q also times key_dim^-0.5; a warp per token.
__device__ __forceinline__ void normalise(const GatedDeltaNetParams& p, int count, Staged& staged) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  for (int t = warp; t < count; t += warps) {
    float q_square = 0.0f, k_square = 0.0f, product = 0.0f;
    for (int i = lane; i < p.key_dim; i += kWarpSize) {
      const float q = staged.q[t][i], k = staged.k[t][i];
      q_square += q * q;
      k_square += k * k;
      product += q * k;
    }
    const float q_factor = rsqrtf(warp_sum(q_square) + kUnitEps) * rsqrtf(float(p.key_dim));
    const float k_factor = rsqrtf(warp_sum(k_square) + kUnitEps);
    product = warp_sum(product);
    for (int i = lane; i < p.key_dim; i += kWarpSize) {
      staged.q[t][i] *= q_factor;
      staged.k[t][i] *= k_factor;
    }
    if (lane == 0) staged.key_query[t] = product * q_factor * k_factor;
  }
}

template <class T>
__device__ __forceinline__ void stage_gates(const GatedDeltaNetParams& p, const Head& head, int first, int count,
                                            Staged& staged) {
  if (int(threadIdx.x) >= count) return;
  const size_t place = (size_t(head.row) * p.steps + first + threadIdx.x) * p.value_heads + head.value_head;
  const float a = load(static_cast<const T*>(p.a) + place), b = load(static_cast<const T*>(p.b) + place);
  const float rate = expf(load(&p.A_log[head.value_head]));
  staged.decay[threadIdx.x] = -rate * softplus(a + load(&p.dt_bias[head.value_head]));
  staged.beta[threadIdx.x] = sigmoid(b);
}

// --- pending tokens ---------------------------------------------------------------------------------

// Where a token's parts lie in its row of pending_state: [k | v | decay | beta].
struct PendingRow {
  float *k, *v, *decay, *beta;
};

__device__ __forceinline__ PendingRow pending_row(const GatedDeltaNetParams& p, const Head& head, int token) {
  float* row = p.pending_state + (size_t(head.slot) * p.window + token) * p.pending_columns;
  float* values = row + p.key_heads * p.key_dim;
  float* decays = values + p.value_heads * p.value_dim;
  return {row + head.key_head * p.key_dim, values + head.value_head * p.value_dim, decays + head.value_head,
          decays + p.value_heads + head.value_head};
}

__device__ __forceinline__ void stage_pending(const GatedDeltaNetParams& p, const Head& head, int first, int count,
                                              Staged& staged) {
  for (int t = 0; t < count; t++) {
    const PendingRow row = pending_row(p, head, first + t);
    for (int i = threadIdx.x; i < p.key_dim; i += blockDim.x) staged.k[t][i] = load(row.k + i);
    for (int i = threadIdx.x; i < p.value_dim; i += blockDim.x) staged.v[t][i] = load(row.v + i);
    if (threadIdx.x == 0) {
      staged.decay[t] = load(row.decay);
      staged.beta[t] = load(row.beta);
    }
  }
}

// k belongs to all value heads of the key head; `with_key` says that this block writes it.
__device__ __forceinline__ void keep_pending(const GatedDeltaNetParams& p, const Head& head, int first, int count,
                                             bool with_key, const Staged& staged) {
  for (int t = 0; t < count; t++) {
    const PendingRow row = pending_row(p, head, first + t);
    for (int i = threadIdx.x; with_key && i < p.key_dim; i += blockDim.x) store_ordered(row.k + i, staged.k[t][i]);
    for (int i = threadIdx.x; i < p.value_dim; i += blockDim.x) store(row.v + i, staged.v[t][i]);
    if (threadIdx.x == 0) {
      store(row.decay, staged.decay[t]);
      store(row.beta, staged.beta[t]);
    }
  }
}

}  // namespace flashnext::gated_delta_net
