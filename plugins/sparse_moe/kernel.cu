// SparseMoE for decoding, in two launches.
//
// `expand` computes silu(gate x) * (up x): a warp owns one row of both. Every block routes its token by itself, in one
// warp, while the others bring x into shared memory: cheaper than a launch. `contract` multiplies with the down
// projections: a warp owns one output and sums over all chosen experts, so that nothing is added atomically.
#include "sparse_moe/kernel.h"

#include "abi.h"
#include "common/math.h"
#include "common/weights.h"
#include "sparse_moe/router.h"

namespace flashnext {
namespace sparse_moe {
namespace {

constexpr int kWarps = 8;
constexpr int kInFlight = 5;  // units that a lane loads before it uses the first
constexpr int kMaxTokens = 65535;

// What `expand` leaves for `contract`.
struct Workspace {
  float* inner;    // [tokens, top_k, inner]
  float* weights;  // [tokens, top_k]
  int* experts;    // [tokens, top_k]
};

__device__ __host__ inline Workspace workspace(const SparseMoEParams& p) {
  float* inner = static_cast<float*>(p.workspace);
  float* weights = inner + size_t(p.tokens) * p.top_k * p.inner;
  return {inner, weights, reinterpret_cast<int*>(weights + size_t(p.tokens) * p.top_k)};
}

template <class W>
__device__ __forceinline__ Matrix<W> gate_up(const SparseMoEParams& p, int expert, int part) {
  const size_t matrix = size_t(expert) * 2 + part;
  const size_t bytes = matrix * p.inner * p.hidden * 16 / Matrix<W>::kUnit;
  const char* values = static_cast<const char*>(p.gate_up_weight) + bytes;
  if constexpr (Matrix<W>::kUnit == 32) {
    const auto* groups = static_cast<const uint8_t*>(p.gate_up_group_scale) + matrix * p.inner * (p.hidden / kScaleGroup);
    return {values, p.hidden, groups, load(&p.gate_up_scale_2[matrix])};
  } else if constexpr (Matrix<W>::kUnit == 16) {
    const int down = (p.inner + kScaleBlock - 1) / kScaleBlock, across = (p.hidden + kScaleBlock - 1) / kScaleBlock;
    return {values, p.hidden, p.gate_up_scale + matrix * down * across};
  } else {
    return {values, p.hidden};
  }
}

template <class W>
__device__ __forceinline__ Matrix<W> down(const SparseMoEParams& p, int expert) {
  const size_t bytes = size_t(expert) * p.hidden * p.inner * 16 / Matrix<W>::kUnit;
  const char* values = static_cast<const char*>(p.down_weight) + bytes;
  if constexpr (Matrix<W>::kUnit == 32) {
    const auto* groups = static_cast<const uint8_t*>(p.down_group_scale);
    return {values, p.inner, groups + size_t(expert) * p.hidden * (p.inner / kScaleGroup), load(&p.down_scale_2[expert])};
  } else if constexpr (Matrix<W>::kUnit == 16) {
    const int down = (p.hidden + kScaleBlock - 1) / kScaleBlock, across = (p.inner + kScaleBlock - 1) / kScaleBlock;
    return {values, p.inner, p.down_scale + size_t(expert) * down * across};
  } else {
    return {values, p.inner};
  }
}

// grid: (rows / kWarps, top_k, tokens)
template <class T, class W>
__global__ void __launch_bounds__(kWarps * kWarpSize) expand(SparseMoEParams p) {
  SHARED_MEMORY(float4, x);
  SHARED_ARRAY(Choice, choice, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int row = blockIdx.x * kWarps + warp, k = blockIdx.y, token = blockIdx.z;
  const int units = p.hidden / Matrix<W>::kUnit;
  if (warp == 0) route<T>(p, token, *choice);
  const T* from = static_cast<const T*>(p.x) + size_t(token) * p.hidden;
  for (int i = threadIdx.x; i < p.hidden / kChunk; i += blockDim.x) {
    const Chunk chunk = load_chunk(from + i * kChunk);
    UNROLL
    for (int j = 0; j < kChunk; j++) place_value<W>(x, units, i * kChunk + j, chunk.at[j]);
  }
  __syncthreads();
  const Workspace out = workspace(p);
  const size_t place = size_t(token) * p.top_k + k;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    store(&out.experts[place], choice->expert[k]);
    store(&out.weights[place], choice->weight[k]);
  }
  if (row >= p.inner) return;
  const Matrix<W> gate = gate_up<W>(p, choice->expert[k], 0), up = gate_up<W>(p, choice->expert[k], 1);
  float gate_sum = 0.0f, up_sum = 0.0f;
  for (int first = lane; first < units; first += kInFlight * kWarpSize) {
    typename Matrix<W>::Loaded gates[kInFlight], ups[kInFlight];
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit >= units) continue;
      gates[i] = gate.load(row, unit);
      ups[i] = up.load(row, unit);
    }
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit >= units) continue;
      gate_sum += Matrix<W>::dot(gates[i], x + unit, units);
      up_sum += Matrix<W>::dot(ups[i], x + unit, units);
    }
  }
  gate_sum = warp_sum(gate_sum);
  up_sum = warp_sum(up_sum);
  if (lane == 0) store(&out.inner[place * p.inner + row], silu(gate_sum) * up_sum);
}

// grid: (hidden / kWarps, tokens)
template <class T, class W>
__global__ void __launch_bounds__(kWarps * kWarpSize) contract(SparseMoEParams p) {
  SHARED_MEMORY(float4, inner);
  SHARED_ARRAY(int, experts, [kMaxTopK]);
  allow_next_launch();
  wait_for_previous_launch();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int row = blockIdx.x * kWarps + warp, token = blockIdx.y;
  const int units = p.inner / Matrix<W>::kUnit, all_units = p.top_k * units;
  const Workspace from = workspace(p);
  if (int(threadIdx.x) < p.top_k) experts[threadIdx.x] = load(&from.experts[token * p.top_k + threadIdx.x]);
  // The experts' vectors one after the other, each times its weight: one long product.
  for (int i = threadIdx.x; i < p.top_k * p.inner; i += blockDim.x) {
    const float weight = load(&from.weights[token * p.top_k + i / p.inner]);
    place_value<W>(inner, all_units, i, weight * load(&from.inner[size_t(token) * p.top_k * p.inner + i]));
  }
  __syncthreads();
  if (row >= p.hidden) return;
  float sum = 0.0f;
  for (int first = lane; first < all_units; first += kInFlight * kWarpSize) {
    typename Matrix<W>::Loaded loaded[kInFlight];
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit < all_units) loaded[i] = down<W>(p, experts[unit / units]).load(row, unit % units);
    }
    UNROLL
    for (int i = 0; i < kInFlight; i++) {
      const int unit = first + i * kWarpSize;
      if (unit < all_units) sum += Matrix<W>::dot(loaded[i], inner + unit, all_units);
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) store(static_cast<T*>(p.y) + size_t(token) * p.hidden + row, sum);
}

// --- launch -----------------------------------------------------------------------------------------

template <class T, class W>
Status launch_formats(const SparseMoEParams& p) {
  if (p.hidden % Matrix<W>::kUnit || p.inner % Matrix<W>::kUnit) {
    return rejected("SparseMoE: hidden and inner must be multiples of 4 (float), 8 (BF16), 16 (FP8) or 32 (NVFP4)");
  }
  const dim3 threads(kWarps * kWarpSize);
  const dim3 expand_grid((p.inner + kWarps - 1) / kWarps, p.top_k, p.tokens);
  const Status status = launch(expand<T, W>, expand_grid, threads, p.hidden * sizeof(float), p.stream, p);
  if (!status) return status;
  const dim3 contract_grid((p.hidden + kWarps - 1) / kWarps, p.tokens);
  return launch(contract<T, W>, contract_grid, threads, p.top_k * p.inner * sizeof(float), p.stream, p);
}

Status check(const SparseMoEParams& p) {
  if (p.experts < 1 || p.experts > kMaxExperts) return rejected("SparseMoE: at most 512 experts");
  if (p.top_k < 1 || p.top_k > kMaxTopK || p.top_k > p.experts) return rejected("SparseMoE: top_k must be 1 to 16");
  if (p.hidden < kChunk || p.hidden % kChunk) return rejected("SparseMoE: hidden must be a multiple of 8");
  if (p.tokens > kMaxTokens) return rejected("SparseMoE: at most 65,535 tokens in a launch");
  const int packing = p.W == kUInt8 ? 2 : 1;
  if (p.hidden_stored * packing != p.hidden || p.inner_stored * packing != p.inner) {
    return rejected("SparseMoE: rows of gate_up_weight must be as long as x, those of down_weight as inner");
  }
  const bool has_blocks = p.gate_up_scale && p.down_scale;
  const bool has_groups = p.gate_up_group_scale && p.down_group_scale && p.gate_up_scale_2 && p.down_scale_2;
  if ((p.W == kFloat8E4M3) != has_blocks) return rejected("SparseMoE: FP8 weights, and no others, need block scales");
  if ((p.W == kUInt8) != has_groups) return rejected("SparseMoE: NVFP4 weights, and no others, need group scales");
  return {};
}

}  // namespace
}  // namespace sparse_moe

int64_t workspace_bytes(const SparseMoEParams& p) {
  return int64_t(p.tokens) * p.top_k * (p.inner + 2) * int64_t(sizeof(float));
}

Status launch(const SparseMoEParams& p) {
  using namespace sparse_moe;
  const Status status = check(p);
  if (!status || p.tokens == 0) return status;
  if (p.T == kFloat32 && p.W == kFloat32) return launch_formats<Float32, Float32>(p);
  if (p.T == kFloat32 && p.W == kBFloat16) return launch_formats<Float32, BFloat16>(p);
  if (p.T == kFloat32 && p.W == kFloat8E4M3) return launch_formats<Float32, Float8E4M3>(p);
  if (p.T == kFloat32 && p.W == kUInt8) return launch_formats<Float32, Float4E2M1>(p);
  if (p.T == kBFloat16 && p.W == kBFloat16) return launch_formats<BFloat16, BFloat16>(p);
  if (p.T == kBFloat16 && p.W == kFloat8E4M3) return launch_formats<BFloat16, Float8E4M3>(p);
  if (p.T == kBFloat16 && p.W == kUInt8) return launch_formats<BFloat16, Float4E2M1>(p);
  return rejected("SparseMoE: no kernel for this combination of formats");
}

REGISTER_OP(sparse_moe, SparseMoEParams);

}  // namespace flashnext
