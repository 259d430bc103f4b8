// Sizes that all kernels of GatedResidual keep to, and from how many tokens on which of them run.
#pragma once

#include "common/memory.h"
#include "gated_residual/params.h"

namespace flashnext {
namespace gated_residual {

constexpr int kMaxBranches = 4;
constexpr int kMaxRank = 320;
// Steps with more tokens go to tensor cores; see docs/kernels.md for the figures.
constexpr int kMaxDecodeTokens = 32;

}  // namespace gated_residual
}  // namespace flashnext
