// SparseMoE: router, expert products straight from the stored weights, weighted sum. Two launches for decoding, six for
// long steps in BF16, which read an expert once for every 64 tokens that chose it.
#pragma once

#include "common/status.h"
#include "sparse_moe/params.h"

namespace flashnext {

int64_t workspace_bytes(const SparseMoEParams& p);
Status launch(const SparseMoEParams& p);

}  // namespace flashnext
