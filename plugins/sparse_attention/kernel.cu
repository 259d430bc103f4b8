// SparseAttention: the launches. prepare.h brings queries and caches up to date, score.h scores blocks, choose.h picks them,
// attend.h attends and merges.
#include "sparse_attention/kernel.h"

#include "abi.h"
#include "sparse_attention/attend.h"
#include "sparse_attention/choose.h"
#include "sparse_attention/prepare.h"
#include "sparse_attention/score.h"

namespace flashnext {
namespace sparse_attention {
namespace {

template <class T>
Status launch_prepare(const SparseAttentionParams& p) {
  const dim3 grid(p.batch * p.steps, (head_tasks(p) + kPrepareWarps - 1) / kPrepareWarps);
  const Status status = launch(prepare<T>, grid, dim3(kPrepareWarps * kWarpSize), 0, p.stream, p);
  if (!status || !p.index_qk || ring_has_room(p)) return status;
  return launch(keep_ring<T>, dim3(p.batch * p.steps), dim3(kWarpSize), 0, p.stream, p);
}

// The steps' tokens from `first` on: at most kStepTile of each sequence.
template <class T>
Status launch_tile(const SparseAttentionParams& p, int first) {
  Status status;
  if (!p.blocks) {
    const dim3 grid((p.index_blocks + kBlockKeys - 1) / kBlockKeys, p.batch);
    const size_t shared = size_t(kStepTile) * p.index_heads * p.index_head_dim * sizeof(float);
    status = launch(score<T>, grid, dim3(kScoreWarps * kWarpSize), shared, p.stream, p, first);
    const int parts = part_count(p.index_blocks);
    if (status && parts > 1) {
      const dim3 grid(parts, kStepTile, p.batch);
      status = launch(choose_in_parts, grid, dim3(kSelectThreads), 0, p.stream, p, first);
    }
    if (status) status = launch(choose, dim3(kStepTile, p.batch), dim3(kSelectThreads), 0, p.stream, p, first);
  }
  if (!status) return status;
  const int splits = split_count(p);
  const dim3 grid(splits, p.kv_heads, p.batch * kStepTile);
  status = launch(attend<T>, grid, dim3(kAttendThreads), 0, p.stream, p, first);
  if (!status) return status;
  const dim3 merge_grid(p.heads, p.batch * kStepTile);
  return launch(merge<T>, merge_grid, dim3(kMaxHeadDim), 0, p.stream, p, first, splits);
}

template <class T>
Status launch_format(const SparseAttentionParams& p) {
  Status status = launch_prepare<T>(p);
  for (int first = 0; status && first < p.steps; first += kStepTile) status = launch_tile<T>(p, first);
  return status;
}

Status check(const SparseAttentionParams& p) {
  if (p.kv_heads < 1 || p.heads % p.kv_heads || p.heads / p.kv_heads > kMaxGroup) {
    return rejected("SparseAttention: a key head must serve a whole number of query heads, at most 16");
  }
  if (p.head_dim < kChunk || p.head_dim % kChunk || p.head_dim > kMaxHeadDim) {
    return rejected("SparseAttention: head_dim must be a multiple of 8, at most 256");
  }
  if (2 * p.frequencies > p.head_dim) return rejected("SparseAttention: more rotary columns than head_dim has");
  if (p.block < 1 || p.budget_blocks < 1) return rejected("SparseAttention: block and budget_blocks must be positive");
  if (!p.blocks == !p.index_qk || !p.blocks != !p.blocks_len) {
    return rejected("SparseAttention: give index_qk and its states, or blocks and blocks_len");
  }
  if (!p.index_qk) return {};
  if (p.index_head_dim < kChunk || p.index_head_dim % kChunk || p.index_head_dim > kMaxIndexDim) {
    return rejected("SparseAttention: index_head_dim must be a multiple of 8, at most 128");
  }
  if (2 * p.frequencies > p.index_head_dim) return rejected("SparseAttention: more rotary columns than index_head_dim");
  if (p.index_heads < 1 || p.index_heads > kMaxIndexHeads) return rejected("SparseAttention: at most 8 index heads");
  if (p.ring < p.block - 1) return rejected("SparseAttention: the ring must hold block - 1 raw keys");
  return {};
}

}  // namespace
}  // namespace sparse_attention

int64_t workspace_bytes(const SparseAttentionParams& p) { return int64_t(sparse_attention::workspace(p).bytes); }

Status launch(const SparseAttentionParams& p) {
  const Status status = sparse_attention::check(p);
  if (!status || p.batch == 0 || p.steps == 0) return status;
  if (p.T == kFloat32) return sparse_attention::launch_format<Float32>(p);
  if (p.T == kBFloat16) return sparse_attention::launch_format<BFloat16>(p);
  return rejected("SparseAttention: no kernel for this format");
}

REGISTER_OP(sparse_attention, SparseAttentionParams);

}  // namespace flashnext
