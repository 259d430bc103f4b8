// Third launch of a long step: the gated RMSNorm of every token's heads, in place; zeros for tokens after the last.
//
// Half a warp is a token and head, a lane eight columns of it.
#pragma once

#include "common/reduce.h"
#include "gated_delta_net/staging.h"

namespace flashnext::gated_delta_net {

constexpr int kFinishThreads = 256;
constexpr int kHeadLanes = kMaxDim / kChunk;
constexpr int kFinishHeads = kFinishThreads / kHeadLanes;

__device__ __forceinline__ Chunk load_weights(const float* pointer) {
  const float4 a = load_four(pointer), b = load_four(pointer + 4);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

static __global__ void __launch_bounds__(kFinishThreads) chunk_finish(GatedDeltaNetParams p) {
  allow_next_launch();
  wait_for_previous_launch();
  const int row = blockIdx.y, head = blockIdx.x * kFinishHeads + threadIdx.x / kHeadLanes;
  const int token = head / p.value_heads, column = threadIdx.x % kHeadLanes * kChunk;
  const bool inside = token < p.steps && column < p.value_dim;
  const bool valid = inside && token < load(&p.new_len[row]);
  const size_t place = (size_t(row) * p.steps * p.value_heads + head) * p.value_dim + column;
  auto* y = static_cast<BFloat16*>(p.y) + place;
  const Chunk values = valid ? load_chunk(y) : Chunk{};
  const float square = warp_sum(dot(values, values, 0.0f), kHeadLanes);
  if (!inside) return;
  Chunk out{};
  if (valid) {
    const float factor = rsqrtf(square / p.value_dim + p.eps);
    const Chunk z = load_chunk(static_cast<const BFloat16*>(p.z) + place), weight = load_weights(p.norm_weight + column);
    UNROLL
    for (int i = 0; i < kChunk; i++) {
      const float gate = p.silu_gate ? silu(z.at[i]) : sigmoid(z.at[i]);
      out.at[i] = weight.at[i] * values.at[i] * factor * gate;
    }
  }
  store_chunk(y, out);
}

}  // namespace flashnext::gated_delta_net
