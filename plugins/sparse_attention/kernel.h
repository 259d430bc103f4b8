// SparseAttention: cache update, block choice, attention over the chosen tokens, gate.
//
// Five launches for a decoding or verifying step: six where the caches hold more than 8,192 index blocks, three with given
// blocks. A longer step runs in tiles of eight tokens,
// which bounds the workspace.
#pragma once

#include "common/status.h"
#include "sparse_attention/params.h"

namespace flashnext {

int64_t workspace_bytes(const SparseAttentionParams& p);
Status launch(const SparseAttentionParams& p);

}  // namespace flashnext
