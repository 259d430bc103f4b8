// GatedResidual: what is accepted, and which kernels run.
//
// Up to 32 tokens, and in float always, those of decode.h run; longer steps go to the tensor cores of prefill.h. The
// two differ in the last bits (prefill.h rounds operands to BF16), so a token's bits depend on whether its step is
// long, and on nothing else beside it.
#include "gated_residual/kernel.h"

#include "abi.h"
#include "gated_residual/decode.h"
#include "gated_residual/prefill.h"

namespace flashnext {
namespace gated_residual {
namespace {

bool is_long(const GatedResidualParams& p) { return p.T == kBFloat16 && p.tokens > kMaxDecodeTokens; }

Status check(const GatedResidualParams& p) {
  if (p.branches < 1 || p.branches > kMaxBranches) return rejected("GatedResidual: branches must be 1 to 4");
  if (p.hidden < kChunk || p.hidden % kChunk) return rejected("GatedResidual: hidden must be a multiple of 8");
  if (p.rank < kChunk || p.rank % kChunk || p.rank > kMaxRank) {
    return rejected("GatedResidual: rank must be a multiple of 8, at most 320");
  }
  if (!!p.embedding + !!p.start + !!p.r != 1) return rejected("GatedResidual: give one of embedding, start and r");
  if (!p.y != !p.s) return rejected("GatedResidual: y and s belong together");
  if (!p.inject_weight != !p.s_out) return rejected("GatedResidual: inject_weight and s_out belong together");
  if ((p.W == kFloat8E4M3) != (p.down_scale && p.up_scale)) {
    return rejected("GatedResidual: FP8 weights, and no others, need down_scale and up_scale");
  }
  const bool has_scale = (!p.r || p.r_scale || p.r_token_scale) &&
                         (!p.r_out || p.r_out_scale || p.r_out_token_scale);
  if (p.R == kFloat8E4M3 && !has_scale) return rejected("GatedResidual: an FP8 state needs scales");
  return {};
}

template <class R, class W>
Status launch_bfloat16(const GatedResidualParams& p) {
  if (is_long(p)) return prefill::launch_formats<BFloat16, R, W>(p);
  return decode::launch_formats<BFloat16, R, W>(p);
}

}  // namespace
}  // namespace gated_residual

int64_t workspace_bytes(const GatedResidualParams& p) {
  using namespace gated_residual;
  return is_long(p) ? prefill::workspace_bytes(p) : decode::workspace_bytes(p);
}

Status launch(const GatedResidualParams& p) {
  using namespace gated_residual;
  const Status status = check(p);
  if (!status || p.tokens == 0) return status;
  if (p.T == kFloat32 && p.R == kFloat32 && p.W == kFloat32) {
    return decode::launch_formats<Float32, Float32, Float32>(p);
  }
  if (p.T == kFloat32 && p.R == kFloat8E4M3 && p.W == kFloat32) {
    return decode::launch_formats<Float32, Float8E4M3, Float32>(p);
  }
  if (p.T == kBFloat16 && p.R == kBFloat16 && p.W == kBFloat16) return launch_bfloat16<BFloat16, BFloat16>(p);
  if (p.T == kBFloat16 && p.R == kFloat8E4M3 && p.W == kBFloat16) return launch_bfloat16<Float8E4M3, BFloat16>(p);
  if (p.T == kBFloat16 && p.R == kBFloat16 && p.W == kFloat8E4M3) return launch_bfloat16<BFloat16, Float8E4M3>(p);
  if (p.T == kBFloat16 && p.R == kFloat8E4M3 && p.W == kFloat8E4M3) return launch_bfloat16<Float8E4M3, Float8E4M3>(p);
  return rejected("GatedResidual: no kernel for this combination of formats");
}

REGISTER_OP(gated_residual, GatedResidualParams);

}  // namespace flashnext
