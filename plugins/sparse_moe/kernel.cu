// SparseMoE: which form a launch takes, and what it accepts.
//
// The form for decoding (per_token.h) reads an expert once for each token that chose it, the grouped one (grouped.h)
// once for all of them, and moves every pair's intermediate results through memory. A step of up to 16 tokens always
// takes the first: what a sequence's next token is must not depend on how many others are decoded with it. A longer one
// takes the form that moves fewer bytes when every expert is as likely as any other: the host does not know the
// choices. In either form a token's result does not depend on its neighbours; between the two it differs by BF16
// rounding.
#include "sparse_moe/kernel.h"

#include <cmath>

#include "abi.h"
#include "sparse_moe/grouped.h"
#include "sparse_moe/per_token.h"

namespace flashnext {
namespace sparse_moe {
namespace {

constexpr int kMaxTokens = 65535;
constexpr int kDecodeTokens = 16;

double expert_bytes(const SparseMoEParams& p) {
  const double values = 3.0 * p.hidden * p.inner;
  if (p.W == kBFloat16) return values * 2;
  if (p.W == kFloat8E4M3) return values * (1 + 4.0 / (kScaleBlock * kScaleBlock));
  return values * (0.5 + 1.0 / kScaleGroup);
}

bool takes_grouped(const SparseMoEParams& p) {
  if (p.T != kBFloat16 || p.tokens <= kDecodeTokens) return false;
  const double pairs = double(p.tokens) * p.top_k;
  const double chosen = p.experts * (1 - std::pow(1 - double(p.top_k) / p.experts, p.tokens));
  const double per_token = pairs * (expert_bytes(p) + 2 * sizeof(float) * p.inner);
  const double grouped = chosen * expert_bytes(p) + pairs * 2 * sizeof(BFloat16) * (double(p.inner) + p.hidden);
  return grouped < per_token;
}

template <class T, class W>
Status launch_formats(const SparseMoEParams& p) {
  if (p.hidden % Matrix<W>::kUnit || p.inner % Matrix<W>::kUnit) {
    return rejected("SparseMoE: hidden and inner must be multiples of 4 (float), 8 (BF16), 16 (FP8) or 32 (NVFP4)");
  }
  if constexpr (sizeof(T) == sizeof(BFloat16)) {
    if (takes_grouped(p)) return launch_grouped<W>(p);
  }
  return launch_per_token<T, W>(p);
}

Status check(const SparseMoEParams& p) {
  if (p.experts < 1 || p.experts > kMaxExperts) return rejected("SparseMoE: at most 512 experts");
  if (p.top_k < 1 || p.top_k > kMaxTopK || p.top_k > p.experts) return rejected("SparseMoE: top_k must be 1 to 16");
  if (p.hidden < kChunk || p.hidden % kChunk) return rejected("SparseMoE: hidden must be a multiple of 8");
  if (p.tokens > kMaxTokens) return rejected("SparseMoE: at most 65,535 tokens in a launch");
  const int packing = p.W == kUInt8 ? 2 : 1;
  if (p.hidden_stored * packing != p.hidden || p.inner_stored * packing != p.inner) {
    return rejected("SparseMoE: rows of gate_up_weight must be as long as x, those of down_weight as inner");
  }
  const bool has_blocks = p.gate_up_scale && p.down_scale;
  const bool has_groups = p.gate_up_group_scale && p.down_group_scale && p.gate_up_scale_2 && p.down_scale_2;
  if ((p.W == kFloat8E4M3) != has_blocks) return rejected("SparseMoE: FP8 weights, and no others, need block scales");
  if ((p.W == kUInt8) != has_groups) return rejected("SparseMoE: NVFP4 weights, and no others, need group scales");
  return {};
}

}  // namespace
}  // namespace sparse_moe

int64_t workspace_bytes(const SparseMoEParams& p) {
  using namespace sparse_moe;
  if (takes_grouped(p)) return int64_t(grouped_workspace(p).bytes);
  return int64_t(p.tokens) * p.top_k * (p.inner + 2) * int64_t(sizeof(float));
}

Status launch(const SparseMoEParams& p) {
  using namespace sparse_moe;
  const Status status = check(p);
  if (!status || p.tokens == 0) return status;
  if (p.T == kFloat32 && p.W == kFloat32) return launch_formats<Float32, Float32>(p);
  if (p.T == kFloat32 && p.W == kBFloat16) return launch_formats<Float32, BFloat16>(p);
  if (p.T == kFloat32 && p.W == kFloat8E4M3) return launch_formats<Float32, Float8E4M3>(p);
  if (p.T == kFloat32 && p.W == kUInt8) return launch_formats<Float32, Float4E2M1>(p);
  if (p.T == kBFloat16 && p.W == kBFloat16) return launch_formats<BFloat16, BFloat16>(p);
  if (p.T == kBFloat16 && p.W == kFloat8E4M3) return launch_formats<BFloat16, Float8E4M3>(p);
  if (p.T == kBFloat16 && p.W == kUInt8) return launch_formats<BFloat16, Float4E2M1>(p);
  return rejected("SparseMoE: no kernel for this combination of formats");
}

REGISTER_OP(sparse_moe, SparseMoEParams);

}  // namespace flashnext
