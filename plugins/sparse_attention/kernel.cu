// SparseAttention: the launches. prepare.h brings queries and caches up to date, score.h scores blocks, choose.h picks
// them, attend.h attends and merges; score_tile.h, unite.h and attend_tile.h do it for long steps on tensor cores.
#include "sparse_attention/kernel.h"

#include <algorithm>
#include <type_traits>

#include "abi.h"
#include "sparse_attention/attend.h"
#include "sparse_attention/attend_tile.h"
#include "sparse_attention/choose.h"
#include "sparse_attention/prepare.h"
#include "sparse_attention/score.h"
#include "sparse_attention/score_tile.h"

namespace flashnext {
namespace sparse_attention {
namespace {

template <class T, class C>
Status launch_prepare(const SparseAttentionParams& p) {
  const int64_t tasks = int64_t(p.batch) * p.steps * head_tasks(p);
  const dim3 grid((tasks + kPrepareWarps - 1) / kPrepareWarps);
  const Status status = launch(prepare<T, C>, grid, dim3(kPrepareWarps * kWarpSize), 0, p.stream, p);
  if (!status || !p.index_qk || ring_has_room(p)) return status;
  return launch(keep_ring<T>, dim3(p.ring, p.batch), dim3(kWarpSize), 0, p.stream, p);
}

// The choice for the steps from `first` on, whose scores are there.
Status launch_choose(const SparseAttentionParams& p, int first) {
  const int parts = part_count(p.index_blocks), steps = score_steps(p);
  Status status;
  if (parts > 1) {
    status = launch(choose_in_parts, dim3(parts, steps, p.batch), dim3(kSelectThreads), 0, p.stream, p, first);
  }
  return status ? launch(choose, dim3(steps, p.batch), dim3(kSelectThreads), 0, p.stream, p, first) : status;
}

// The steps' tokens from `first` on: at most kStepTile of each sequence.
template <class T, class C>
Status launch_steps(const SparseAttentionParams& p, int first) {
  Status status;
  if (!p.blocks) {
    const dim3 grid((p.index_blocks + kBlockKeys - 1) / kBlockKeys, p.batch);
    const size_t shared = size_t(score_steps(p)) * p.index_heads * p.index_head_dim * sizeof(float);
    status = launch(score<T>, grid, dim3(kScoreWarps * kWarpSize), shared, p.stream, p, first);
    if (status) status = launch_choose(p, first);
  }
  if (!status) return status;
  const int splits = split_count(p);
  const dim3 grid(splits, p.kv_heads, p.batch * kStepTile);
  status = launch(attend<T, C>, grid, dim3(kAttendThreads), 0, p.stream, p, first);
  if (!status) return status;
  const dim3 merge_grid(p.heads, p.batch * kStepTile);
  return launch(merge<T>, merge_grid, dim3(kMaxHeadDim), 0, p.stream, p, first, splits);
}

template <class T>
Status launch_scores(const SparseAttentionParams& p, int first) {
  const int queries = (score_steps(p) + score_queries(p) - 1) / score_queries(p);
  const int sharing = std::max(1, kScoreGrid / (queries * p.batch));
  const dim3 grid(std::min((p.index_blocks + kTileKeys - 1) / kTileKeys, sharing), queries, p.batch);
  return launch(score_tile<T>, grid, dim3(kScoreTileThreads), kScoreTileShared, p.stream, p, first);
}

// A long step: choices for all its queries, then attention of all.
template <class T, class C>
Status launch_tiles(const SparseAttentionParams& p) {
  Status status;
  const bool scored = !p.blocks && p.index_blocks > p.budget_blocks;
  for (int first = 0; status && (scored || p.blocks_out) && first < p.steps; first += score_steps(p)) {
    if (scored) status = launch_scores<T>(p, first);
    if (status) status = launch_choose(p, first);
  }
  const dim3 tiles(tile_count(p), p.batch), grid(tile_count(p), p.kv_heads, p.batch);
  if (status && (scored || p.blocks)) status = launch(unite, tiles, dim3(kUniteThreads), 0, p.stream, p);
  if (!status) return status;
  return launch(attend_tile<T, C>, grid, dim3(kTileThreads), sizeof(AttendTileShared<C>), p.stream, p);
}

template <class T, class C>
Status launch_format(const SparseAttentionParams& p) {
  Status status = launch_prepare<T, C>(p);
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (status && on_tensor_cores(p)) return launch_tiles<T, C>(p);
  }
  for (int first = 0; status && first < p.steps; first += kStepTile) status = launch_steps<T, C>(p, first);
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
  if (p.K == kFloat8E4M3 ? p.head_dim % 16 != 0 : p.K != p.T || p.k_scale || p.v_scale) {
    return rejected(
        "SparseAttention: caches are in the activations' format and without scales, or in E4M3 with a head_dim that is "
        "a multiple of 16");
  }
  if (p.tokens / p.block >= 1 << kBlockBits) return rejected("SparseAttention: at most 16,777,215 blocks of tokens");
  if (!p.index_qk) return {};
  if (p.index_blocks < 1) return rejected("SparseAttention: index_key_state holds no blocks");
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

int64_t workspace_bytes(const SparseAttentionParams& p) {
  if (!sparse_attention::check(p) || p.batch == 0 || p.steps == 0) return 0;  // `launch` says why
  return int64_t(sparse_attention::workspace(p).bytes);
}

Status launch(const SparseAttentionParams& p) {
  const Status status = sparse_attention::check(p);
  if (!status || p.batch == 0 || p.steps == 0) return status;
  const bool fp8 = p.K == kFloat8E4M3;
  if (p.T == kFloat32 && fp8) return sparse_attention::launch_format<Float32, Float8E4M3>(p);
  if (p.T == kBFloat16 && fp8) return sparse_attention::launch_format<BFloat16, Float8E4M3>(p);
  if (p.T == kFloat32) return sparse_attention::launch_format<Float32, Float32>(p);
  if (p.T == kBFloat16) return sparse_attention::launch_format<BFloat16, BFloat16>(p);
  return rejected("SparseAttention: no kernel for this format");
}

REGISTER_OP(sparse_attention, SparseAttentionParams);

}  // namespace flashnext
