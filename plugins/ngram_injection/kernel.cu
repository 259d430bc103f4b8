// NgramInjection.
//
// Sums over a branch (two norms, the similarity) give the gate of a token and branch and the factor of the convolution's
// own norm, two numbers. With those, the convolution's input at any token of the step is a product of its value, so
// `inject` needs no token's result from another block: all tokens run at once. In a short step each block measures the
// (at most four) tokens under its convolution itself, which saves a launch; in a long one `measure` does it once for all.
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
constexpr int kShortSteps = 8;
constexpr float kLeastDistance = 1e-6f;

// Whether the ring has room for the step's inputs beside those that other blocks still read.
__device__ __host__ inline bool ring_has_room(const NgramInjectionParams& p) {
  return p.ring >= p.steps + (p.width - 1) * p.dilation;
}

// Whether one launch does it all.
__device__ __host__ inline bool is_short(const NgramInjectionParams& p) {
  return p.steps <= kShortSteps && ring_has_room(p);
}

// Per token and branch, for the launches after the first.
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

// What the convolution's input is made with.
struct Measured {
  float gate;
  float factor;  // 1 / rms of the gated value
};

constexpr int kSums = 4;  // of key^2, state^2, key * state (each times its norm's weight), value^2

// In all threads of the block, for its branch. `parts` as `block_sum` takes them.
template <class T, class R>
__device__ __forceinline__ Measured measure_token(const NgramInjectionParams& p, const Place& at, float* parts) {
  float sums[kSums] = {};
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
  const float mean = 1.0f / p.hidden;
  const float norms = rsqrtf(sums[0] * mean + p.eps) * rsqrtf(sums[1] * mean + p.eps);
  const float distance = sums[2] * norms * rsqrtf(float(p.hidden));
  const float root = sqrtf(fmaxf(fabsf(distance), kLeastDistance));
  const float gate = sigmoid(distance > 0.0f ? root : (distance < 0.0f ? -root : 0.0f));
  return {gate, rsqrtf(gate * gate * sums[3] * mean + p.eps)};
}

template <class T, class R>
__global__ void __launch_bounds__(kThreads) measure(NgramInjectionParams p) {
  SHARED_ARRAY(float, parts, [kSums * kWarps]);
  allow_next_launch();
  wait_for_previous_launch();
  const Place at = this_place(p);
  const Measured found = measure_token<T, R>(p, at, parts);
  if (threadIdx.x != 0) return;
  const Workspace out = workspace(p);
  store(&out.gate[at.token * p.branches + at.branch], found.gate);
  store(&out.factor[at.token * p.branches + at.branch], found.factor);
}

__device__ __forceinline__ Measured measured_before(const NgramInjectionParams& p, const Place& at) {
  const Workspace from = workspace(p);
  const int place = at.token * p.branches + at.branch;
  return {load(&from.gate[place]), load(&from.factor[place])};
}

// Of the tokens under the convolution: this one, and those 1, 2, … dilations before it, as far as the step has them.
struct Taps {
  Measured at[kTaps];
};

template <class T, class R>
__device__ __forceinline__ Taps measured_taps(const NgramInjectionParams& p, const Place& at, float (*parts)[kSums * kWarps]) {
  Taps taps{};
  UNROLL
  for (int back = 0; back < kTaps; back++) {
    const Place tap{at.row, at.step - back * p.dilation, at.token - back * p.dilation, at.branch};
    if (back >= p.width || tap.step < 0) continue;
    taps.at[back] = is_short(p) ? measure_token<T, R>(p, tap, parts[back % 2]) : measured_before(p, tap);
  }
  return taps;
}

// The convolution's inputs at token `token`, eight channels from `column` of the branch, as they are stored.
template <class T>
__device__ __forceinline__ Chunk conv_input(const NgramInjectionParams& p, int token, int branch,
                                            const Measured& measured, int column) {
  Chunk value = load_chunk(static_cast<const T*>(p.value) + size_t(token) * p.hidden + column);
  const Chunk weight = load_chunk(static_cast<const T*>(p.norm_conv_weight) + branch * p.hidden + column);
  UNROLL
  for (int i = 0; i < kChunk; i++) {
    value.at[i] = rounded<T>(measured.gate * value.at[i] * measured.factor * (1.0f + weight.at[i]));
  }
  return value;
}

template <class T>
__device__ __forceinline__ T* ring_place(const NgramInjectionParams& p, const Place& at, int position, int column) {
  const size_t row = size_t(load(&p.slots[at.row])) * p.ring + position % p.ring;
  return static_cast<T*>(p.conv_state) + (row * p.branches + at.branch) * p.hidden + column;
}

template <class T>
__device__ __forceinline__ Chunk convolve(const NgramInjectionParams& p, const Place& at, const Taps& taps, int past,
                                          int column) {
  Chunk sum{};
  UNROLL
  for (int back = kTaps - 1; back >= 0; back--) {
    if (back >= p.width) continue;
    const int step = at.step - back * p.dilation;
    Chunk input{};  // before the sequence's start
    if (step >= 0) {
      input = conv_input<T>(p, at.token - back * p.dilation, at.branch, taps.at[back], column);
    } else if (past + step >= 0) {
      input = load_chunk(ring_place<T>(p, at, past + step, column));
    }
    const int tap = p.width - 1 - back;
    const T* weight = static_cast<const T*>(p.conv_weight) + (at.branch * p.hidden + column) * p.width + tap;
    UNROLL
    for (int i = 0; i < kChunk; i++) sum.at[i] += load(weight + i * p.width) * input.at[i];
  }
  return sum;
}

// The new state's eight columns.
template <class T, class R>
__device__ __forceinline__ Chunk injected(const NgramInjectionParams& p, const Place& at, const Taps& taps, int past,
                                          bool valid, int column) {
  Chunk state = new_state<T, R>(residual_of(p), at.token, at.branch, column);
  const Chunk value = load_chunk(static_cast<const T*>(p.value) + size_t(at.token) * p.hidden + column);
  const float gate = taps.at[0].gate;
  const Chunk conv = valid ? convolve<T>(p, at, taps, past, column) : Chunk{};
  UNROLL
  for (int i = 0; i < kChunk; i++) state.at[i] += gate * value.at[i] + silu(conv.at[i]);
  return state;
}

// The scale of an FP8 branch: given, or from its largest magnitude (a second pass, which recomputes).
template <class T, class R>
__device__ __forceinline__ float store_scale(const NgramInjectionParams& p, const Place& at, const Taps& taps, int past,
                                             bool valid, float* parts) {
  if (!p.r_out_token_scale) return load(&p.r_out_scale[at.branch]);
  float largest = 0.0f;
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    const Chunk state = injected<T, R>(p, at, taps, past, valid, column);
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
  SHARED_ARRAY(float, parts, [2][kSums * kWarps]);
  SHARED_ARRAY(float, maxima, [kWarps]);
  allow_next_launch();
  wait_for_previous_launch();
  const Place at = this_place(p);
  const int past = load(&p.past_len[at.row]);
  const bool valid = at.step < load(&p.new_len[at.row]);
  const Taps taps = measured_taps<T, R>(p, at, parts);
  float scale = 1.0f;
  Rounding rounding{};
  if constexpr (sizeof(R) == 1) {
    scale = store_scale<T, R>(p, at, taps, past, valid, maxima);
    rounding = rounding_of(p, at.token, at.branch);
  }
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    Chunk state = injected<T, R>(p, at, taps, past, valid, column);
    if constexpr (sizeof(R) == 1) {
      UNROLL
      for (int i = 0; i < kChunk; i++) state.at[i] = quotient(state.at[i], scale, rounding, column + i);
    }
    store_chunk(static_cast<R*>(p.r_out) + (size_t(at.token) * p.branches + at.branch) * p.hidden + column, state);
    if (valid && ring_has_room(p)) {
      store_chunk(ring_place<T>(p, at, past + at.step, column),
                  conv_input<T>(p, at.token, at.branch, taps.at[0], column));
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
  const Measured measured = measured_before(p, at);
  for (int column = threadIdx.x * kChunk; column < p.hidden; column += kThreads * kChunk) {
    store_chunk(ring_place<T>(p, at, past + at.step, column),
                conv_input<T>(p, at.token, at.branch, measured, column));
  }
}

// --- launch -----------------------------------------------------------------------------------------

template <class T, class R>
Status launch_formats(const NgramInjectionParams& p) {
  const dim3 grid(p.batch * p.steps, p.branches), threads(kThreads);
  Status status;
  if (!is_short(p)) status = launch(measure<T, R>, grid, threads, 0, p.stream, p);
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
