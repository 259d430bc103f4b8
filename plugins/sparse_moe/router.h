// The router: which experts a token takes, best first, ties to the lower index; and with what weight.
//
// One warp, all logits in its registers. A logit becomes an unsigned integer of the same order; each round takes the
// warp's largest and, among equals, the lowest index: two `redux` instructions. The softmax is monotonic, so the order
// is that of the logits.
#pragma once

#include "common/memory.h"
#include "common/order.h"
#include "common/reduce.h"
#include "sparse_moe/params.h"

namespace flashnext::sparse_moe {

constexpr int kMaxExperts = 512;
constexpr int kMaxTopK = 16;
constexpr int kLaneExperts = kMaxExperts / kWarpSize;

struct Choice {
  int expert[kMaxTopK];
  float weight[kMaxTopK];
};

template <class T>
__device__ __forceinline__ void route(const SparseMoEParams& p, int token, Choice& choice) {
  const int lane = threadIdx.x % kWarpSize;
  const T* logits = static_cast<const T*>(p.router_logits) + size_t(token) * p.experts;
  uint32_t keys[kLaneExperts];
  UNROLL
  for (int i = 0; i < kLaneExperts; i++) {
    const int expert = i * kWarpSize + lane;
    keys[i] = expert < p.experts ? ordered(load(logits + expert)) : 0;
  }
  float largest = 0.0f, sum = 0.0f;
  for (int k = 0; k < p.top_k; k++) {
    uint32_t best = 0;
    UNROLL
    for (int i = 0; i < kLaneExperts; i++) best = best > keys[i] ? best : keys[i];
    best = __reduce_max_sync(kAllLanes, best);
    uint32_t index = kMaxExperts - 1;
    UNROLL
    for (int i = kLaneExperts - 1; i >= 0; i--) {
      if (keys[i] == best) index = i * kWarpSize + lane;
    }
    index = __reduce_min_sync(kAllLanes, index);
    if (k == 0) {
      largest = from_ordered(best);
      if (!p.normalize) {
        for (int i = lane; i < p.experts; i += kWarpSize) sum += expf(load(logits + i) - largest);
        sum = warp_sum(sum);
      }
    }
    const float weight = expf(from_ordered(best) - largest);
    if (p.normalize) sum += weight;
    UNROLL
    for (int i = 0; i < kLaneExperts; i++) {
      if (int(index) == i * kWarpSize + lane) keys[i] = 0;
    }
    if (lane == 0) {
      choice.expert[k] = int(index);
      choice.weight[k] = weight;
    }
  }
  if (lane == 0) {
    for (int k = 0; k < p.top_k; k++) choice.weight[k] /= sum;
  }
}

}  // namespace flashnext::sparse_moe
