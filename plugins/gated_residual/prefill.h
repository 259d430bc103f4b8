// GatedResidual for long steps: both projections on tensor cores, in two launches per 2,048 tokens.
//
// `project` multiplies a tile of 64 tokens of one branch's new state with W_down and W_inject. The state is made in
// float from what is stored, and rounded to BF16 only as an operand: times (1 + gamma), without the norm's factor,
// which is one number per token and branch and multiplies the finished sums. So the state is read once for the sum of
// squares and the products, and no normalised state exists in memory. `combine` adds the branches' sums, in order, and
// multiplies with W_up; it owns 64 columns of all branches at a time, so the mean over the branches stays inside a
// thread. It makes the new state a second time, from the same stored values, and is the only one to write it: r_out may
// be r.
//
// Why twice: a gate needs the whole of its token's state, 20 KB, and the weights want some 64 tokens at a time in every
// block; both together do not fit on chip. The second reading follows within a round, whose state (21 MB in FP8, 42 MB
// in BF16) an L2 cache of 50 MB holds wholly or in part.
//
// A token's sums are the same whatever else is in the step. How the work is cut (rows of W_down per block, columns per
// block) follows the number of tokens, the order of no sum does.
#pragma once

#include "gated_residual/combine.h"
#include "gated_residual/project.h"

namespace flashnext {
namespace gated_residual {
namespace prefill {

template <class T, class R, class W, int Pairs>
Status launch_project(const GatedResidualParams& p, int first, int tiles) {
  constexpr int kRows = Pairs * kWarps * kPair;
  const int rows = p.rank + (p.inject_weight ? p.branches : 0);
  const size_t shared = 2 * Tile<kDepth>::bytes(kTokens) + (kAhead<Pairs> + 1) * Tile<kDepth>::bytes(kRows);
  return launch(project<T, R, W, Pairs>, dim3((rows + kRows - 1) / kRows, p.branches, tiles), dim3(kThreads), shared,
                p.stream, p, first);
}

template <class T, class R, class W>
Status launch_round(const GatedResidualParams& p, int first) {
  const int tokens = p.tokens - first < kRoundTokens ? p.tokens - first : kRoundTokens;
  const int tiles = (tokens + kTokens - 1) / kTokens;
  const bool few = tiles * p.branches * 2 < kBlocks;
  const Status status =
      few ? launch_project<T, R, W, 1>(p, first, tiles) : launch_project<T, R, W, 3>(p, first, tiles);
  if (!status) return status;
  const int groups = (p.hidden + kColumns - 1) / kColumns;
  const int wanted = (2 * kBlocks + tiles - 1) / tiles, per_block = (groups + wanted - 1) / wanted;
  const size_t shared = Tile<kMaxRank>::bytes(kTokens) + 2 * Tile<kDepth>::bytes(kUpRows);
  return launch(combine<T, R, W>, dim3((groups + per_block - 1) / per_block, tiles), dim3(kThreads), shared, p.stream,
                p, first);
}

template <class T, class R, class W>
Status launch_formats(const GatedResidualParams& p) {
  Status status;
  for (int first = 0; status && first < p.tokens; first += kRoundTokens) status = launch_round<T, R, W>(p, first);
  return status;
}

}  // namespace prefill
}  // namespace gated_residual
}  // namespace flashnext
