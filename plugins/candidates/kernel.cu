// Candidates. `gather` picks the best of every 8,192 logits, a block each; `finish` picks the best of those and sorts them.
// Whatever is among the best of the row is among the best of its part, so the result is exact.
//
// Selection passes over its keys several times, so both bring them into shared memory first; and `gather` hands on
// indices alone: their logits are read again, from sectors that are in the caches.
#include "candidates/kernel.h"

#include "abi.h"
#include "common/order.h"
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

// grid: (parts, rows)
template <class T>
__global__ void __launch_bounds__(kSelectThreads, 1) gather(CandidatesParams p) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  SHARED_ARRAY(unsigned, keys, [kPart]);
  allow_next_launch();
  wait_for_previous_launch();
  const int begin = blockIdx.x * kPart, size = min(kPart, p.vocabulary - begin);
  int* const indices = part_indices(p, blockIdx.y) + blockIdx.x * p.count;
  if (size <= p.count) {
    for (int i = threadIdx.x; i < p.count; i += kSelectThreads) store(indices + i, i < size ? begin + i : -1);
    return;
  }
  load_keys(row_of<T>(p, blockIdx.y) + begin, size, p.vocabulary % kChunk == 0, keys);
  __syncthreads();
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
  return int64_t(p.rows) * candidates::part_count(p) * p.count * int64_t(sizeof(int));
}

Status launch(const CandidatesParams& p) {
  if (p.count < 1 || p.count > candidates::kMaxCount || p.count > p.vocabulary) {
    return rejected("Candidates: count must be 1 to 512, and at most the vocabulary");
  }
  if (p.rows == 0) return {};
  if (p.T == kFloat32) return candidates::launch_format<Float32>(p);
  if (p.T == kBFloat16) return candidates::launch_format<BFloat16>(p);
  return rejected("Candidates: no kernel for this format");
}

REGISTER_OP(candidates, CandidatesParams);

}  // namespace flashnext
