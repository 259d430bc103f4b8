// NgramInjection.
//
// `measure` takes the sums over a branch: two norms, the similarity, and from them the gate of every token and branch and
// the factor of the convolution's own norm, two numbers each. With those, the convolution's input at any token of the step
// is a product of its value, so `inject` needs no token's result from another block: all tokens run at once.
#include "ngram_injection/kernel.h"

#include "abi.h"
#include "common/math.h"
#include "common/reduce.h"
#include "common/residual.h"

namespace flashnext {
namespace ngram_injection {
namespace {

constexpr int kThreads = 320;  // one chunk of columns each at the official hidden size
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTaps = 4;
constexpr float kLeastDistance = 1e-6f;

// Per token and branch.
struct Workspace {
  float* gate;
  float* factor;  // 1 / rms of the gated value
};

__device__ __forceinline__ Workspace workspace(const NgramInjectionParams& p) {
  float* gate = static_cast<float*>(p.workspace);
  return {gate, gate + size_t(p.batch) * p.steps * p.branches};
}

// What a block works on: one branch of one token.
struct Place {
  int row, step, token, branch;
};

__device__ __forceinline__ Place this_place(const NgramInjectionParams& p) {
  const int token = blockIdx.x;
  return {token / p.steps, token % p.steps, token, int(blockIdx.y)};
}

template <class T, class R>
__global__ void __launch_bounds__(kThreads) measure(NgramInjectionParams p) {
  SHARED_ARRAY(float, parts, [4 * kWarps]);
  allow_next_launch();
  wait_for_previous_launch();
  const Place at = this_place(p);
  float sums[4] = {};  // of key^2, state^2, key * state (each times its norm's weight), value^2
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    const int channel = at.branch * p.hidden + column;
    const Chunk key = load_chunk(static_cast<const T*>(p.key) + size_t(at.token) * p.branches * p.hidden + channel);
    const Chunk value = load_chunk(static_cast<const T*>(p.value) + size_t(at.token) * p.hidden + column);
    const Chunk state = new_state<T, R>(residual_of(p), at.token, at.branch, column);
    const Chunk key_weight = load_chunk(static_cast<const T*>(p.norm_key_weight) + channel);
    const Chunk query_weight = load_chunk(static_cast<const T*>(p.norm_query_weight) + channel);
    sums[0] = dot(key, key, sums[0]);
    sums[1] = dot(state, state, sums[1]);
    sums[3] = dot(value, value, sums[3]);
    UNROLL
    for (int i = 0; i < kChunk; i++) {
      sums[2] += key.at[i] * (1.0f + key_weight.at[i]) * (state.at[i] * (1.0f + query_weight.at[i]));
    }
  }
  block_sum(sums, parts);
  if (threadIdx.x != 0) return;
  const float mean = 1.0f / p.hidden;
  const float norms = rsqrtf(sums[0] * mean + p.eps) * rsqrtf(sums[1] * mean + p.eps);
  const float distance = sums[2] * norms * rsqrtf(float(p.hidden));
  const float root = sqrtf(fmaxf(fabsf(distance), kLeastDistance));
  const float gate = sigmoid(distance > 0.0f ? root : (distance < 0.0f ? -root : 0.0f));
  const Workspace out = workspace(p);
  store(&out.gate[at.token * p.branches + at.branch], gate);
  store(&out.factor[at.token * p.branches + at.branch], rsqrtf(gate * gate * sums[3] * mean + p.eps));
}

// The convolution's inputs at token `step` of the row, eight channels from `column` of the branch, as they are stored.
template <class T>
__device__ __forceinline__ Chunk conv_input(const NgramInjectionParams& p, const Place& at, int step, int column) {
  const Workspace from = workspace(p);
  const int token = at.row * p.steps + step, place = token * p.branches + at.branch;
  const float gate = load(&from.gate[place]), factor = load(&from.factor[place]);
  Chunk value = load_chunk(static_cast<const T*>(p.value) + size_t(token) * p.hidden + column);
  const Chunk weight = load_chunk(static_cast<const T*>(p.norm_conv_weight) + at.branch * p.hidden + column);
  UNROLL
  for (int i = 0; i < kChunk; i++) value.at[i] = rounded<T>(gate * value.at[i] * factor * (1.0f + weight.at[i]));
  return value;
}

template <class T>
__device__ __forceinline__ T* ring_place(const NgramInjectionParams& p, const Place& at, int position, int column) {
  const size_t row = size_t(load(&p.slots[at.row])) * p.ring + position % p.ring;
  return static_cast<T*>(p.conv_state) + (row * p.branches + at.branch) * p.hidden + column;
}

// `steps_back` tokens before the block's own; zeros before the sequence's start.
template <class T>
__device__ __forceinline__ Chunk earlier_input(const NgramInjectionParams& p, const Place& at, int past, int steps_back,
                                               int column) {
  const int step = at.step - steps_back;
  if (step >= 0) return conv_input<T>(p, at, step, column);
  return past + step >= 0 ? load_chunk(ring_place<T>(p, at, past + step, column)) : Chunk{};
}

template <class T>
__device__ __forceinline__ Chunk convolve(const NgramInjectionParams& p, const Place& at, int past, int column) {
  Chunk sum{};
  for (int tap = 0; tap < p.width; tap++) {
    const Chunk input = earlier_input<T>(p, at, past, (p.width - 1 - tap) * p.dilation, column);
    const T* weight = static_cast<const T*>(p.conv_weight) + (at.branch * p.hidden + column) * p.width + tap;
    UNROLL
    for (int i = 0; i < kChunk; i++) sum.at[i] += load(weight + i * p.width) * input.at[i];
  }
  return sum;
}

// Whether the ring has room for the step's inputs beside those that other blocks still read.
__device__ __host__ inline bool ring_has_room(const NgramInjectionParams& p) {
  return p.ring >= p.steps + (p.width - 1) * p.dilation;
}

// The new state's eight columns.
template <class T, class R>
__device__ __forceinline__ Chunk injected(const NgramInjectionParams& p, const Place& at, int past, bool valid,
                                          int column) {
  Chunk state = new_state<T, R>(residual_of(p), at.token, at.branch, column);
  const Chunk value = load_chunk(static_cast<const T*>(p.value) + size_t(at.token) * p.hidden + column);
  const float gate = load(&workspace(p).gate[at.token * p.branches + at.branch]);
  const Chunk conv = valid ? convolve<T>(p, at, past, column) : Chunk{};
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] += gate * value.at[i] + silu(conv.at[i]);
  return state;
}

// The scale of an FP8 branch: given, or from its largest magnitude (a second pass, which recomputes).
template <class T, class R>
__device__ __forceinline__ float store_scale(const NgramInjectionParams& p, const Place& at, int past, bool valid,
                                             float* parts) {
  if (!p.r_out_token_scale) return load(&p.r_out_scale[at.branch]);
  float largest = 0.0f;
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    const Chunk state = injected<T, R>(p, at, past, valid, column);
    UNROLL
    for (int i = 0; i < kChunk; i++) largest = fmaxf(largest, fabsf(state.at[i]));
  }
  largest = warp_max(largest);
  if (threadIdx.x % kWarpSize == 0) parts[threadIdx.x / kWarpSize] = largest;
  __syncthreads();
  for (int w = 0; w < kWarps; w++) largest = fmaxf(largest, parts[w]);
  const float scale = dynamic_scale(largest);
  if (threadIdx.x == 0) store(&p.r_out_token_scale[at.token * p.branches + at.branch], scale);
  return scale;
}

template <class T, class R>
__global__ void __launch_bounds__(kThreads, 1) inject(NgramInjectionParams p) {
  SHARED_ARRAY(float, parts, [kWarps]);
  allow_next_launch();
  wait_for_previous_launch();
  const Place at = this_place(p);
  const int past = load(&p.past_len[at.row]);
  const bool valid = at.step < load(&p.new_len[at.row]);
  float scale = 1.0f;
  Rounding rounding{};
  if constexpr (sizeof(R) == 1) {
    scale = store_scale<T, R>(p, at, past, valid, parts);
    rounding = rounding_of(p, at.token, at.branch);
  }
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    Chunk state = injected<T, R>(p, at, past, valid, column);
    if constexpr (sizeof(R) == 1) {
      UNROLL
      for (int i = 0; i < kChunk; i++) state.at[i] = quotient(state.at[i], scale, rounding, column + i);
    }
    store_chunk(static_cast<R*>(p.r_out) + (size_t(at.token) * p.branches + at.branch) * p.hidden + column, state);
    if (valid && ring_has_room(p)) {
      store_chunk(ring_place<T>(p, at, past + at.step, column), conv_input<T>(p, at, at.step, column));
    }
  }
}

// The ring's part of a long step, once nobody reads the old inputs any more: its last `ring` tokens.
template <class T>
__global__ void __launch_bounds__(kThreads) keep_ring(NgramInjectionParams p) {
  allow_next_launch();
  wait_for_previous_launch();
  const Place at = this_place(p);
  const int past = load(&p.past_len[at.row]), count = load(&p.new_len[at.row]);
  if (at.step >= count || at.step < count - p.ring) return;
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    store_chunk(ring_place<T>(p, at, past + at.step, column), conv_input<T>(p, at, at.step, column));
  }
}

// --- launch -----------------------------------------------------------------------------------------

template <class T, class R>
Status launch_formats(const NgramInjectionParams& p) {
  const dim3 grid(p.batch * p.steps, p.branches), threads(kThreads);
  Status status = launch(measure<T, R>, grid, threads, 0, p.stream, p);
  if (status) status = launch(inject<T, R>, grid, threads, 0, p.stream, p);
  if (status && !ring_has_room(p)) status = launch(keep_ring<T>, grid, threads, 0, p.stream, p);
  return status;
}

Status check(const NgramInjectionParams& p) {
  if (p.hidden < kChunk || p.hidden % kChunk) return rejected("NgramInjection: hidden must be a multiple of 8");
  if (p.width < 1 || p.width > kTaps) return rejected("NgramInjection: the convolution must be 1 to 4 wide");
  if (p.dilation < 1 || p.ring < (p.width - 1) * p.dilation) {
    return rejected("NgramInjection: the ring must hold (width - 1) * dilation inputs");
  }
  if (!p.embedding == !p.r) return rejected("NgramInjection: give embedding or r");
  if (!p.y != !p.s) return rejected("NgramInjection: y and s belong together");
  const bool has_scale = (p.embedding || p.r_scale || p.r_token_scale) && (p.r_out_scale || p.r_out_token_scale);
  if (p.R == kFloat8E4M3 && !has_scale) return rejected("NgramInjection: an FP8 state needs scales");
  return {};
}

}  // namespace
}  // namespace ngram_injection

int64_t workspace_bytes(const NgramInjectionParams& p) {
  return int64_t(p.batch) * p.steps * p.branches * 2 * int64_t(sizeof(float));
}

Status launch(const NgramInjectionParams& p) {
  using namespace ngram_injection;
  const Status status = check(p);
  if (!status || p.batch == 0 || p.steps == 0) return status;
  if (p.T == kFloat32 && p.R == kFloat32) return launch_formats<Float32, Float32>(p);
  if (p.T == kFloat32 && p.R == kFloat8E4M3) return launch_formats<Float32, Float8E4M3>(p);
  if (p.T == kBFloat16 && p.R == kBFloat16) return launch_formats<BFloat16, BFloat16>(p);
  if (p.T == kBFloat16 && p.R == kFloat8E4M3) return launch_formats<BFloat16, Float8E4M3>(p);
  return rejected("NgramInjection: no kernel for this combination of formats");
}

REGISTER_OP(ngram_injection, NgramInjectionParams);

}  // namespace flashnext
