// Candidates. `gather` picks the best of every 8,192 logits, a block each; `finish` picks the best of those and sorts them.
// Whatever is among the best of the row is among the best of its part, so the result is exact.
//
// Selection passes over its keys several times, so both bring them into shared memory first; and `gather` hands on
// indices alone: their logits are read again, from sectors that are in the caches.
//
// The row's sum goes the same way: `gather` sums each part relative to the part's largest logit, `finish` brings the parts
// to the row's. The sampler counts on a sum within 1e-5 of the exact one (runtime/logits.py). Worst cases of float32: 45
// additions in a row (2.7e-6); an exponential within two units in the last place (0.3e-6) in each of the two stages; its
// argument x, rounded three times and to a relative 1.8e-7, whose mean over the distribution is at most ln(vocabulary) =
// 12.4 (2.2e-6). Together 5.5e-6.
#include "candidates/kernel.h"

#include "abi.h"
#include "common/order.h"
#include "common/reduce.h"
#include "common/select.h"

namespace flashnext {
namespace candidates {
namespace {

constexpr int kPart = 8192;
constexpr int kMaxCount = 512;
constexpr int kLoads = kPart / kSelectThreads / kChunk;  // of a thread, in flight together
constexpr int kMaxCached = 16384;                        // keys of `finish` that are kept in shared memory
constexpr int kGathers = 8;                              // of a thread, in flight together
static_assert(kMaxCount <= kSelectThreads, "finish sorts with a thread per candidate");

__device__ __host__ inline int part_count(const CandidatesParams& p) { return (p.vocabulary + kPart - 1) / kPart; }

// In the workspace [rows, parts, count]: ascending indices of each part's best, -1 where a part has fewer.
__device__ __forceinline__ int* part_indices(const CandidatesParams& p, int row) {
  return static_cast<int*>(p.workspace) + size_t(row) * part_count(p) * p.count;
}

// Behind them [rows, parts, 2]: each part's largest logit, and its sum relative to that.
__device__ __forceinline__ float* part_sums(const CandidatesParams& p, int row) {
  const size_t indices = size_t(p.rows) * part_count(p) * p.count;
  return static_cast<float*>(p.workspace) + indices + size_t(row) * part_count(p) * 2;
}

template <class T>
__device__ __forceinline__ const T* row_of(const CandidatesParams& p, int row) {
  return static_cast<const T*>(p.logits) + size_t(row) * p.vocabulary;
}

// Keys of `size` logits. Rows begin at a multiple of 16 bytes only if the vocabulary is a multiple of eight.
template <class T>
__device__ __forceinline__ void load_keys(const T* logits, int size, bool aligned, unsigned* keys) {
  if (!aligned) {
    for (int i = threadIdx.x; i < size; i += kSelectThreads) keys[i] = ordered(load(logits + i));
    return;
  }
  Packed<T> packed[kLoads];
  UNROLL
  for (int j = 0; j < kLoads; j++) {
    const int i = (j * kSelectThreads + threadIdx.x) * kChunk;
    if (i < size) packed[j] = load_packed(logits + i);
  }
  UNROLL
  for (int j = 0; j < kLoads; j++) {
    const int i = (j * kSelectThreads + threadIdx.x) * kChunk;
    if (i >= size) continue;
    const Chunk chunk = unpack(packed[j]);
    UNROLL
    for (int k = 0; k < kChunk; k++) keys[i + k] = ordered(chunk.at[k]);
  }
}

// exp((logit - largest) * inverse_temperature); nothing for a logit of -inf, even if all are. By the block, which has a
// barrier before the keys and none behind.
__device__ __forceinline__ void sum_part(const unsigned* keys, int size, float inverse_temperature, float* result) {
  SHARED_ARRAY(float, parts, [2][kSelectWarps]);
  float largest = -INFINITY, sum[1] = {0.0f};
  for (int i = threadIdx.x; i < size; i += kSelectThreads) largest = fmaxf(largest, from_ordered(keys[i]));
  largest = block_max(largest, parts[0]);
  for (int i = threadIdx.x; i < size; i += kSelectThreads) {
    const float logit = from_ordered(keys[i]);
    sum[0] += logit == -INFINITY ? 0.0f : expf((logit - largest) * inverse_temperature);
  }
  block_sum(sum, parts[1]);
  if (threadIdx.x > 0) return;
  store(result, largest);
  store(result + 1, sum[0]);
}

// grid: (parts, rows)
template <class T>
__global__ void __launch_bounds__(kSelectThreads, 1) gather(CandidatesParams p) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  SHARED_ARRAY(unsigned, keys, [kPart]);
  allow_next_launch();
  wait_for_previous_launch();
  const int begin = blockIdx.x * kPart, size = min(kPart, p.vocabulary - begin);
  int* const indices = part_indices(p, blockIdx.y) + blockIdx.x * p.count;
  load_keys(row_of<T>(p, blockIdx.y) + begin, size, p.vocabulary % kChunk == 0, keys);
  __syncthreads();
  sum_part(keys, size, p.inverse_temperature, part_sums(p, blockIdx.y) + blockIdx.x * 2);
  if (size <= p.count) {
    for (int i = threadIdx.x; i < p.count; i += kSelectThreads) store(indices + i, i < size ? begin + i : -1);
    return;
  }
  const auto take = [&](int at, int i) { store(indices + at, begin + i); };
  select_largest([&](int i) { return keys[i]; }, size, p.count, take, *shared);
}

struct Candidate {
  unsigned key;
  int index;
  __device__ bool before(const Candidate& other) const {
    return key != other.key ? key > other.key : index < other.index;
  }
};

// Bitonic, over `size` (a power of two) candidates.
__device__ __forceinline__ void sort(Candidate* list, int size) {
  const int i = threadIdx.x;
  for (int run = 2; run <= size; run *= 2) {
    for (int by = run / 2; by > 0; by /= 2) {
      const int partner = i ^ by;
      if (i < size && partner > i) {
        const bool descending = (i & run) == 0;
        const Candidate mine = list[i], other = list[partner];
        if (other.before(mine) == descending) {
          list[i] = other;
          list[partner] = mine;
        }
      }
      __syncthreads();
    }
  }
}

// 0, which is below every logit, where there is no index.
template <class T>
__device__ __forceinline__ unsigned key_of_index(const T* logits, int index) {
  return index < 0 ? 0 : ordered(load(logits + index));
}

template <class T>
__device__ __forceinline__ void gather_keys(const T* logits, const int* indices, int count, unsigned* keys) {
  for (int start = threadIdx.x; start < count; start += kGathers * kSelectThreads) {
    int index[kGathers];
    UNROLL
    for (int j = 0; j < kGathers; j++) {
      const int i = start + j * kSelectThreads;
      index[j] = i < count ? load(indices + i) : -1;
    }
    UNROLL
    for (int j = 0; j < kGathers; j++) {
      const int i = start + j * kSelectThreads;
      if (i < count) keys[i] = key_of_index(logits, index[j]);
    }
  }
}

// The row's sum, relative to its largest logit, by one warp: lane 0 has it.
__device__ __forceinline__ float sum_of_parts(const CandidatesParams& p, int row, float largest) {
  const float* const sums = part_sums(p, row);
  float sum = 0.0f;
  for (int part = threadIdx.x; part < part_count(p); part += kWarpSize) {
    sum += load(sums + 2 * part + 1) * expf((load(sums + 2 * part) - largest) * p.inverse_temperature);
  }
  return warp_sum(sum);
}

// grid: (rows); shared memory: a key for every candidate of the parts, unless there are too many
template <class T>
__global__ void __launch_bounds__(kSelectThreads, 1) finish(CandidatesParams p) {
  SHARED_MEMORY(unsigned, keys);
  SHARED_ARRAY(SelectShared, shared, [1]);
  SHARED_ARRAY(Candidate, list, [kMaxCount]);
  allow_next_launch();
  wait_for_previous_launch();
  const int all = part_count(p) * p.count;
  const T* const logits = row_of<T>(p, blockIdx.x);
  const int* const indices = part_indices(p, blockIdx.x);
  const bool cached = all <= kMaxCached;
  if (cached) gather_keys(logits, indices, all, keys);
  int padded = 1;
  while (padded < p.count) padded *= 2;
  for (int i = threadIdx.x; i < padded; i += kSelectThreads) list[i] = {0, 0x7FFFFFFF};
  __syncthreads();
  const auto key = [&](int i) { return cached ? keys[i] : key_of_index(logits, load(indices + i)); };
  const auto take = [&](int at, int i) { list[at] = {key(i), load(indices + i)}; };
  if (all > p.count) {
    select_largest(key, all, p.count, take, *shared);
  } else {
    for (int i = threadIdx.x; i < all; i += kSelectThreads) take(i, i);
  }
  __syncthreads();
  sort(list, padded);
  for (int i = threadIdx.x; i < p.count; i += kSelectThreads) {
    store(p.values + size_t(blockIdx.x) * p.count + i, from_ordered(list[i].key));
    store(p.indices + size_t(blockIdx.x) * p.count + i, list[i].index);
  }
  if (threadIdx.x >= kWarpSize) return;
  const float sum = sum_of_parts(p, blockIdx.x, from_ordered(list[0].key));
  if (threadIdx.x == 0) store(p.sums + blockIdx.x, sum);
}

template <class T>
Status launch_format(const CandidatesParams& p) {
  const dim3 threads(kSelectThreads);
  const Status status = launch(gather<T>, dim3(part_count(p), p.rows), threads, 0, p.stream, p);
  if (!status) return status;
  const int all = part_count(p) * p.count;
  const size_t cached = all <= kMaxCached ? all * sizeof(unsigned) : 0;
  return launch(finish<T>, dim3(p.rows), threads, cached, p.stream, p);
}

}  // namespace
}  // namespace candidates

int64_t workspace_bytes(const CandidatesParams& p) {
  return int64_t(p.rows) * candidates::part_count(p) * (p.count + 2) * int64_t(sizeof(int));
}

Status launch(const CandidatesParams& p) {
  if (p.count < 1 || p.count > candidates::kMaxCount || p.count > p.vocabulary) {
    return rejected("Candidates: count must be 1 to 512, and at most the vocabulary");
  }
  if (!(p.inverse_temperature > 0.0f)) return rejected("Candidates: inverse_temperature must be above 0");
  if (p.rows == 0) return {};
  if (p.T == kFloat32) return candidates::launch_format<Float32>(p);
  if (p.T == kBFloat16) return candidates::launch_format<BFloat16>(p);
  return rejected("Candidates: no kernel for this format");
}

REGISTER_OP(candidates, CandidatesParams);

}  // namespace flashnext
