// Small kernels, each with a mistake that can be switched on: the harness has to catch every one.
#include "abi.h"
#include "common/memory.h"
#include "common/ptx.h"
#include "common/reduce.h"
#include "params.h"

namespace flashnext {
namespace probe {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

enum Fault {
  kNone,
  kMissingBarrier,       // the warps' sums are read before all are written
  kMissingReuseBarrier,  // … and overwritten before all are read
  kBound,                // one column too many
  kSharedBound,          // one element of a shared array too many
  kFragment,             // the halves of b's fragment exchanged
  kMissingAtomic,
  kDivergentBarrier,
  kDeadlock,
  kShuffleMask,
  kBlockConflict,
  kMisaligned,
  kMissingCopyWait,
  kUnwritten,
  kSharedTotal,  // static and dynamic arrays that do not fit together without being asked for
  kSharedMost,   // … that do not fit together on the smallest target
};

// Sum of a row, twice over the same shared array.
__global__ void row_sums(ProbeParams p) {
  SHARED_ARRAY(float, parts, [kWarps]);
  const float* row = p.x + size_t(blockIdx.x) * p.columns;
  const int columns = p.columns + (p.fault == kBound ? 1 : 0);
  float total = 0.0f;
  for (int half = 0; half < 2; half++) {
    float sum = 0.0f;
    for (int i = half * kThreads + threadIdx.x; i < columns; i += 2 * kThreads) sum += load(row + i);
    sum = warp_sum(sum);
    if (p.fault != kMissingReuseBarrier) __syncthreads();
    const int place = threadIdx.x / kWarpSize + (p.fault == kSharedBound ? 1 : 0);
    if (threadIdx.x % kWarpSize == 0) parts[place] = sum;
    if (p.fault != kMissingBarrier) __syncthreads();
    for (int w = 0; w < kWarps; w++) total += parts[w];
  }
  const int target = p.fault == kBlockConflict ? 0 : blockIdx.x;
  const bool skipped = p.fault == kUnwritten && blockIdx.x == 1;
  if (threadIdx.x == 0 && !skipped) store(&p.sums[target], total);
}

// product = a * b^T with ldmatrix, mma and cp.async.
__global__ void multiply(ProbeParams p) {
  SHARED_ARRAY(BFloat16, a, [16 * 16]);
  SHARED_ARRAY(BFloat16, b, [16 * 16]);  // the second half is never used, but ldmatrix loads it
  const int lane = threadIdx.x;
  const auto* from_a = static_cast<const BFloat16*>(p.a);
  const auto* from_b = static_cast<const BFloat16*>(p.b);
  copy_async(&a[lane * kChunk], from_a + lane * kChunk);
  copy_async(&b[lane * kChunk], from_b + (lane < 16 ? lane * kChunk : 0), lane < 16 ? 16 : 0);
  commit_copies();
  if (p.fault != kMissingCopyWait) wait_for_copies<0>();
  __syncwarp();
  uint32_t fragment_a[4], fragment_b[4];
  load_matrices(fragment_a, shared_address(&a[lane % 16 * 16 + lane / 16 * 8]));
  load_matrices(fragment_b, shared_address(&b[(lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8]));
  const int swap = p.fault == kFragment ? 1 : 0;
  const uint32_t half[2] = {fragment_b[swap], fragment_b[1 - swap]};
  float sum[4] = {};
  mma_bf16(sum, fragment_a, half, sum);
  for (int i = 0; i < 4; i++) store(&p.product[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2], sum[i]);
}

// How many of a row's values lie in each quarter of [0, 1).
__global__ void histogram(ProbeParams p) {
  SHARED_ARRAY(int, count, [4]);
  if (threadIdx.x < 4) count[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.columns; i += kThreads) {
    int* bin = &count[int(load(p.x + i) * 4.0f)];
    if (p.fault == kMissingAtomic) {
      *bin += 1;
    } else {
      atomicAdd(bin, 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < 4) store(&p.bins[threadIdx.x], count[threadIdx.x]);
}

__global__ void misuse(ProbeParams p) {
  if (p.fault == kDivergentBarrier) {
    if (threadIdx.x < kWarpSize) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  }
  if (p.fault == kDeadlock && threadIdx.x < kWarpSize) named_barrier(1, 2 * kWarpSize);
  if (p.fault == kShuffleMask && threadIdx.x < 16) __shfl_xor_sync(0xFFFFu, int(threadIdx.x), 16);
  if (p.fault == kSharedTotal || p.fault == kSharedMost) {
    SHARED_ARRAY(float, large, [5 << 10]);
    large[threadIdx.x] = 0.0f;
  }
  if (p.fault == kMisaligned) load_chunk(reinterpret_cast<const Float32*>(p.x + 1));
}

}  // namespace
}  // namespace probe

int64_t workspace_bytes(const ProbeParams&) { return 0; }

Status launch(const ProbeParams& p) {
  using namespace probe;
  Status status = launch(row_sums, dim3(p.rows), dim3(kThreads), 0, nullptr, p);
  if (status) status = launch(multiply, dim3(1), dim3(kWarpSize), 0, nullptr, p);
  if (status) status = launch(histogram, dim3(1), dim3(kThreads), 0, nullptr, p);
  const size_t shared = p.fault == kSharedTotal ? kDynamicUnasked : p.fault == kSharedMost ? 80 << 10 : 0;
  if (status) status = launch(misuse, dim3(1), dim3(kThreads), shared, nullptr, p);
  return status;
}

REGISTER_OP(probe, ProbeParams);

}  // namespace flashnext
