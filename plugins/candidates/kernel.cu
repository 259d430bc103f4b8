// Candidates. `gather` picks the best of every 4,096 logits, a block each; `finish` picks the best of those and sorts them.
// Whatever is among the best of the row is among the best of its part, so the result is exact.
#include "candidates/kernel.h"

#include "abi.h"
#include "common/order.h"
#include "common/select.h"

namespace flashnext {
namespace candidates {
namespace {

constexpr int kPart = 4096;
constexpr int kMaxCount = 512;
static_assert(kMaxCount <= kSelectThreads, "finish sorts with a thread per candidate");

struct Workspace {
  int* keys;     // [rows, parts, count], ordered; 0 where a part has fewer
  int* indices;  // [rows, parts, count]
};

__device__ __host__ inline int part_count(const CandidatesParams& p) { return (p.vocabulary + kPart - 1) / kPart; }

__device__ __host__ inline Workspace workspace(const CandidatesParams& p) {
  int* keys = static_cast<int*>(p.workspace);
  return {keys, keys + size_t(p.rows) * part_count(p) * p.count};
}

// grid: (parts, rows)
template <class T>
__global__ void __launch_bounds__(kSelectThreads) gather(CandidatesParams p) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const int begin = blockIdx.x * kPart, size = min(kPart, p.vocabulary - begin);
  const T* logits = static_cast<const T*>(p.logits) + size_t(blockIdx.y) * p.vocabulary + begin;
  const size_t place = (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * p.count;
  int* const keys = workspace(p).keys + place;
  int* const indices = workspace(p).indices + place;
  const auto key = [&](int i) { return ordered(load(logits + i)); };
  const auto take = [&](int at, int i) {
    store(keys + at, int(key(i)));
    store(indices + at, begin + i);
  };
  if (size > p.count) return select_largest(key, size, p.count, take, *shared);
  for (int i = threadIdx.x; i < p.count; i += kSelectThreads) {
    if (i < size) {
      take(i, i);
    } else {
      store(keys + i, 0);
      store(indices + i, -1);
    }
  }
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

// grid: (rows)
__global__ void __launch_bounds__(kSelectThreads) finish(CandidatesParams p) {
  SHARED_ARRAY(SelectShared, shared, [1]);
  SHARED_ARRAY(Candidate, list, [kMaxCount]);
  allow_next_launch();
  wait_for_previous_launch();
  const int all = part_count(p) * p.count;
  const int* keys = workspace(p).keys + size_t(blockIdx.x) * all;
  const int* indices = workspace(p).indices + size_t(blockIdx.x) * all;
  int padded = 1;
  while (padded < p.count) padded *= 2;
  for (int i = threadIdx.x; i < padded; i += kSelectThreads) list[i] = {0, 0x7FFFFFFF};
  __syncthreads();
  const auto key = [&](int i) { return unsigned(load(keys + i)); };
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
  const Status status =
      launch(gather<T>, dim3(part_count(p), p.rows), dim3(kSelectThreads), 0, p.stream, p);
  return status ? launch(finish, dim3(p.rows), dim3(kSelectThreads), 0, p.stream, p) : status;
}

}  // namespace
}  // namespace candidates

int64_t workspace_bytes(const CandidatesParams& p) {
  return int64_t(p.rows) * candidates::part_count(p) * p.count * 2 * int64_t(sizeof(int));
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
