// SparseMoE for decoding: router, expert products straight from the stored weights, weighted sum. Two launches.
//
// It handles any number of tokens, but reads an expert once for each token that chose it.
#pragma once

#include "common/status.h"
#include "sparse_moe/params.h"

namespace flashnext {

int64_t workspace_bytes(const SparseMoEParams& p);
Status launch(const SparseMoEParams& p);

}  // namespace flashnext
