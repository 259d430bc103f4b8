// The choice among scored blocks: the best `budget_blocks` of them, ties to the lower block.
//
// Many blocks are looked through in parts, each by a block of threads of its own, which keeps as many as could be
// chosen; the choice among those is the choice among all, since a part keeps the lower ones of equals, and in order.
// Where all complete blocks fit the budget, all are chosen and no score is read.
#pragma once

#include "common/order.h"
#include "common/select.h"
#include "sparse_attention/plan.h"

namespace flashnext::sparse_attention {

// grid: (parts, score_steps, batch). Nothing to do for a query that sees no more than one part.
__global__ void __launch_bounds__(kSelectThreads, 1) choose_in_parts(SparseAttentionParams p, int first) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  SHARED_ARRAY(unsigned, keys, [kPartBlocks]);
  allow_next_launch();
  wait_for_previous_launch();
  const Query query = query_at(p, blockIdx.z, first + blockIdx.y);
  const int begin = blockIdx.x * kPartBlocks, complete = query.valid ? complete_blocks(p, query) : 0;
  const int size = min(kPartBlocks, complete - begin);
  if (complete <= max(kPartBlocks, p.budget_blocks) || size <= 0) return;
  const size_t row = score_place(p, query, first);
  const float* scores = workspace(p).scores + row * score_stride(p) + begin;
  for (int i = threadIdx.x; i < size; i += kSelectThreads) keys[i] = ordered(load(scores + i));
  __syncthreads();
  const int kept = kept_blocks(p);
  const size_t place = (row * gridDim.x + blockIdx.x) * kept;
  int* const out_keys = workspace(p).part_keys + place;
  int* const out_blocks = workspace(p).part_blocks + place;
  const auto take = [&](int at, int i) {
    store(out_keys + at, int(keys[i]));
    store(out_blocks + at, begin + i);
  };
  if (size > kept) return select_largest([&](int i) { return keys[i]; }, size, kept, take, *shared);
  for (int i = threadIdx.x; i < size; i += kSelectThreads) take(i, i);
}

// The query's blocks among `complete` (more than the budget) to `chosen`, in ascending order.
__device__ __forceinline__ void choose_best(const SparseAttentionParams& p, size_t place, int complete, int* chosen,
                                            SelectShared& shared) {
  if (complete <= kPartBlocks) {
    const float* scores = workspace(p).scores + place * score_stride(p);
    const auto key = [&](int i) { return ordered(load(scores + i)); };
    const auto take = [&](int at, int i) { store(chosen + at, i); };
    return select_largest(key, complete, p.budget_blocks, take, shared);
  }
  const int kept = kept_blocks(p), whole_parts = complete / kPartBlocks;
  const int count = whole_parts * kept + min(kept, complete - whole_parts * kPartBlocks);
  const size_t part_place = place * part_count(p.index_blocks) * kept;
  const int* keys = workspace(p).part_keys + part_place;
  const int* blocks = workspace(p).part_blocks + part_place;
  const auto key = [&](int i) { return unsigned(load(keys + i)); };
  const auto take = [&](int at, int i) { store(chosen + at, load(blocks + i)); };
  select_largest(key, count, p.budget_blocks, take, shared);
}

// grid: (score_steps, batch)
__global__ void __launch_bounds__(kSelectThreads, 1) choose(SparseAttentionParams p, int first) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const Query query = query_at(p, blockIdx.y, first + blockIdx.x);
  const int count = load(&p.new_len[query.row]);
  // Rows without tokens return no blocks.
  const bool empty = p.blocks_out && count == 0 && query.step == 0;
  if (!query.valid && !empty) return;
  const bool returned = p.blocks_out && (empty || query.step == count - 1);
  if (on_tensor_cores(p) && !returned && is_dense(p, query_tile(p, query.row, query.step / tile_queries(p)))) return;
  int* chosen = workspace(p).chosen + token_place(p, query) * p.budget_blocks;
  const int complete = empty ? 0 : complete_blocks(p, query);
  if (complete > p.budget_blocks) {
    choose_best(p, score_place(p, query, first), complete, chosen, *shared);
  } else {
    for (int i = threadIdx.x; i < p.budget_blocks; i += blockDim.x) store(chosen + i, i < complete ? i : -1);
  }
  if (!returned) return;
  __syncthreads();
  int* out = p.blocks_out + size_t(query.row) * p.budget_blocks;
  for (int i = threadIdx.x; i < p.budget_blocks; i += blockDim.x) store(out + i, load(chosen + i));
}

}  // namespace flashnext::sparse_attention
