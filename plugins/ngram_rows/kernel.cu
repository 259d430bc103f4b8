// N-gram rows. A block is a token: some of its threads hash a head each, then all copy the rows, eight columns at a time,
// or one where the number of columns is no multiple of eight (small models).
//
// A row in host memory comes over PCIe, where a request takes microseconds. So a thread asks for all its parts before it
// uses the first one: at the official sizes 16 rows of 20 parts are one part for each of 320 threads.
#include "ngram_rows/kernel.h"

#include <type_traits>

#include "abi.h"
#include "common/weights.h"

namespace flashnext {
namespace ngram_rows {
namespace {

constexpr int kThreads = 320;
constexpr int kBlocks = 2;  // of a multiprocessor: left alone, ptxas saves registers for more and spills
constexpr int kMaxHeads = 64;
constexpr int kLoads = 4;  // of a thread, in flight together

__device__ __forceinline__ int64_t wide(const int32_t* pair) {
  return int64_t(uint64_t(uint32_t(load(pair + 1))) << 32 | uint32_t(load(pair)));
}

// The row that a head reads for the token at `step`: products wrap in 64 bits, the remainder is never negative, and an eos
// hides what came before it.
__device__ __forceinline__ int64_t row_of(const NgramRowsParams& p, int sequence, int step, int head) {
  const int order = 2 + head / (p.heads / (p.size - 1));
  const int32_t* const tokens = p.token_ids + int64_t(sequence) * p.steps;
  const int32_t* const context = p.context + int64_t(sequence) * p.before + p.before;
  uint64_t mixed = uint64_t(int64_t(load(tokens + step))) * uint64_t(wide(p.multipliers));
  bool across_eos = false;
  for (int shift = 1; shift < order; shift++) {
    const int at = step - shift;
    const int token = at < 0 ? load(context + at) : load(tokens + at);
    across_eos |= token == p.eos;
    mixed ^= uint64_t(int64_t(across_eos ? p.eos : token)) * uint64_t(wide(p.multipliers + 2 * shift));
  }
  const int64_t size = wide(p.head_sizes + 2 * head), rest = int64_t(mixed) % size;
  return (rest < 0 ? rest + size : rest) + wide(p.head_offsets + 2 * head);
}

// kPart columns of a row as the table has them, kept packed until all of a thread's have been asked for.
template <class T, int kPart>
struct Part {
  Packed<T> packed;
};
template <class T>
struct Part<T, 1> {
  T value;
};
template <>
struct Part<Float4E2M1, kChunk> {
  uint32_t codes;
  float scale;
};

template <class T, int kPart>
__device__ __forceinline__ Part<T, kPart> load_part(const NgramRowsParams& p, int64_t row, int part) {
  if constexpr (std::is_same_v<T, Float4E2M1>) {
    const int64_t at = row * (p.columns / kChunk) + part;  // the group's scale is that of two parts
    const auto* scales = static_cast<const Float8E4M3*>(p.row_scales);
    return {uint32_t(load(static_cast<const int32_t*>(p.table) + at)), load(scales + at / 2)};
  } else {
    const T* const at = static_cast<const T*>(p.table) + row * p.columns + part * kPart;
    if constexpr (kPart == 1) {
      NOTE_LOAD(at, sizeof(T));
      return {*at};
    } else {
      return {load_packed(at)};
    }
  }
}

template <class T, class O>
__device__ __forceinline__ void write(O* out, const Part<T, 1>& part, float scale) {
  if constexpr (std::is_same_v<T, O>) {
    NOTE_STORE(out, sizeof(O));
    *out = part.value;
  } else {
    store(out, to_float(part.value) * scale);
  }
}

template <class T, class O>
__device__ __forceinline__ void write(O* out, const Part<T, kChunk>& part, float scale) {
  if constexpr (std::is_same_v<T, O>) {
    store_packed(out, part.packed);
  } else {
    Chunk chunk;
    if constexpr (std::is_same_v<T, Float4E2M1>) {
      scale *= part.scale;
      UNROLL
      for (int i = 0; i < kChunk; i++) chunk.at[i] = from_e2m1(part.codes >> (4 * i));
    } else {
      chunk = unpack(part.packed);
    }
    UNROLL
    for (int i = 0; i < kChunk; i++) chunk.at[i] *= scale;
    store_chunk(out, chunk);
  }
}

template <class O, int kPart>
__device__ __forceinline__ void clear(O* out) {
  if constexpr (kPart == 1) {
    store(out, 0.0f);
  } else {
    store_chunk(out, Chunk{});
  }
}

// grid: (steps, batch)
template <class T, class O, int kPart>
__global__ void __launch_bounds__(kThreads, kBlocks) gather(NgramRowsParams p) {
  SHARED_ARRAY(int64_t, rows, [kMaxHeads]);
  allow_next_launch();
  wait_for_previous_launch();
  const int step = blockIdx.x, sequence = blockIdx.y, parts = p.columns / kPart, all = p.heads * parts;
  O* const out = static_cast<O*>(p.out) + (int64_t(sequence) * p.steps + step) * p.heads * p.columns;
  if (step >= load(p.new_len + sequence)) {
    for (int i = threadIdx.x; i < all; i += kThreads) clear<O, kPart>(out + int64_t(i) * kPart);
    return;
  }
  for (int head = threadIdx.x; head < p.heads; head += kThreads) rows[head] = row_of(p, sequence, step, head);
  __syncthreads();
  for (int start = threadIdx.x; start < all; start += kLoads * kThreads) {
    Part<T, kPart> loaded[kLoads];
    UNROLL
    for (int j = 0; j < kLoads; j++) {
      const int i = start + j * kThreads;
      if (i < all) loaded[j] = load_part<T, kPart>(p, rows[i / parts], i % parts);
    }
    UNROLL
    for (int j = 0; j < kLoads; j++) {
      const int i = start + j * kThreads;
      if (i < all) write<T, O>(out + int64_t(i) * kPart, loaded[j], p.scale);
    }
  }
}

template <class T, class O>
Status launch_formats(const NgramRowsParams& p) {
  const dim3 grid(p.steps, p.batch);
  if constexpr (!std::is_same_v<T, Float4E2M1>) {
    if (p.columns % kChunk) return launch(gather<T, O, 1>, grid, dim3(kThreads), 0, p.stream, p);
  }
  return launch(gather<T, O, kChunk>, grid, dim3(kThreads), 0, p.stream, p);
}

}  // namespace
}  // namespace ngram_rows

int64_t workspace_bytes(const NgramRowsParams&) { return 0; }

Status launch(const NgramRowsParams& p) {
  using namespace ngram_rows;
  const bool packed = p.T == kUInt8;
  if (packed && p.columns % kScaleGroup) return rejected("NgramRows: columns of NVFP4 must be a multiple of 16");
  if (p.columns_stored != p.columns / (packed ? 2 : 1) || packed != (p.row_scales != nullptr)) {
    return rejected("NgramRows: NVFP4 tables, and no others, have half as many bytes as columns, and row scales");
  }
  if (p.size < 2 || p.before < p.size - 1 || p.heads < 1 || p.heads > kMaxHeads || p.heads % (p.size - 1)) {
    return rejected("NgramRows: 1 to 64 heads in equal parts for 2 to `size` tokens, with size - 1 tokens of context");
  }
  if (p.batch == 0 || p.steps == 0) return {};
  if (p.T == kBFloat16 && p.O == kBFloat16) return launch_formats<BFloat16, BFloat16>(p);
  if (p.T == kBFloat16 && p.O == kFloat32) return launch_formats<BFloat16, Float32>(p);
  if (p.T == kFloat32 && p.O == kFloat32) return launch_formats<Float32, Float32>(p);
  if (p.T == kFloat32 && p.O == kBFloat16) return launch_formats<Float32, BFloat16>(p);
  if (p.T == kFloat8E4M3 && p.O == kBFloat16) return launch_formats<Float8E4M3, BFloat16>(p);
  if (p.T == kFloat8E4M3 && p.O == kFloat32) return launch_formats<Float8E4M3, Float32>(p);
  if (p.T == kUInt8 && p.O == kBFloat16) return launch_formats<Float4E2M1, BFloat16>(p);
  if (p.T == kUInt8 && p.O == kFloat32) return launch_formats<Float4E2M1, Float32>(p);
  return rejected("NgramRows: no kernel for these formats");
}

REGISTER_OP(ngram_rows, NgramRowsParams);

}  // namespace flashnext
