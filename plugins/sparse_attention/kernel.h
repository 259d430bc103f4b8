// SparseAttention: cache update, block choice, attention over the chosen tokens, gate.
//
// Five launches for a decoding or verifying step: six where the caches hold more than 8,192 index blocks, three with
// given blocks.
//
// Longer steps in BF16 run on tensor cores: caches (two launches), scores and choice (two or three, for as many steps
// at a time as `score_bytes` hold scores of), lists of the blocks that neighbouring queries see together, attention.
// Choices are made for the whole step first, so that attention is one launch. Long steps in float, for comparisons, go
// through the kernels of short ones, eight tokens at a time.
#pragma once

#include "common/status.h"
#include "sparse_attention/params.h"

namespace flashnext {

int64_t workspace_bytes(const SparseAttentionParams& p);
Status launch(const SparseAttentionParams& p);

}  // namespace flashnext
