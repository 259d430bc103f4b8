// First launch of a long step: everything of a chunk that does not need the state. A block of threads is one chunk and key
// head: q and k of all its value heads are the same, and so are the products k . k and q . k.
//
//  1. Causal convolution and SiLU, eight channels a thread. q and k get unit length; they go to shared memory and to the
//     workspace, v to the workspace alone.
//  2. k . k (four warps) and q . k (the other four) on tensor cores; a warp has 16 rows in registers.
//  3. For up to four value heads at a time: sums of log decays, A into shared memory and P into the workspace, A's
//     inverse in float (triangle.h), T into the workspace.
//
// Decays are exponentials of sums over a span of their own. Such a sum is the difference of two running sums, which are kept
// as two floats each, so that small decays behind a large one are not lost; no exponent is above zero.
#pragma once

#include "gated_delta_net/chunks.h"
#include "gated_delta_net/triangle.h"

namespace flashnext::gated_delta_net {

constexpr int kLocalThreads = 256;
constexpr int kSystems = kLocalThreads / kSolvers;  // value heads at a time
constexpr int kValueTokens = 16;                    // that a thread convolves one after the other
constexpr float kLowestDecay = -128.0f;             // exp of it is 0, and infinities would cancel to NaN

// --- convolution ------------------------------------------------------------------------------------

struct Taps {
  float at[kTaps][kChunk];
};

// Of eight neighbouring channels. A narrower convolution's missing taps are the oldest.
__device__ __forceinline__ Taps load_taps(const GatedDeltaNetParams& p, int channel) {
  const auto* weight = static_cast<const BFloat16*>(p.conv_weight) + size_t(channel) * p.width;
  Taps taps;
  if (p.width == kTaps) {
    UNROLL
    for (int i = 0; i < kTaps; i++) {  // [channel][tap]: two channels in each eight values
      const Chunk two = load_chunk(weight + i * kChunk);
      UNROLL
      for (int j = 0; j < kChunk; j++) taps.at[j % kTaps][2 * i + j / kTaps] = two.at[j];
    }
    return taps;
  }
  UNROLL
  for (int tap = 0; tap < kTaps; tap++) {
    const int place = tap - (kTaps - p.width);
    UNROLL
    for (int j = 0; j < kChunk; j++) taps.at[tap][j] = place < 0 ? 0.0f : load(weight + j * p.width + place);
  }
  return taps;
}

// Eight channels' inputs of a token of the step, or of one before it.
__device__ __forceinline__ Chunk conv_inputs(const GatedDeltaNetParams& p, const Head& head, int token, int channel) {
  const int position = head.past + token;
  return position < 0 ? Chunk{} : load_chunk(conv_row<BFloat16>(p, head, position) + channel);
}

// keep(t, values) for `tokens` tokens from `first` on; zeros for tokens after the sequence's last, and if not `inside`.
template <class Keep>
__device__ __forceinline__ void convolve_eight(const GatedDeltaNetParams& p, const Head& head, int first, int tokens,
                                               int channel, bool inside, Keep keep) {
  Taps taps{};
  Chunk window[kTaps] = {};
  if (inside && first < head.count) {
    taps = load_taps(p, channel);
    UNROLL
    for (int tap = 1; tap < kTaps; tap++) {
      if (tap > kTaps - p.width) window[tap] = conv_inputs(p, head, first + tap - kTaps, channel);
    }
  }
  for (int t = 0; t < tokens; t++) {
    Chunk out{};
    if (inside && first + t < head.count) {
      UNROLL
      for (int tap = 0; tap + 1 < kTaps; tap++) window[tap] = window[tap + 1];
      window[kTaps - 1] = conv_inputs(p, head, first + t, channel);
      UNROLL
      for (int j = 0; j < kChunk; j++) {
        UNROLL
        for (int tap = 0; tap < kTaps; tap++) out.at[j] += taps.at[tap][j] * window[tap].at[j];
        out.at[j] = silu(out.at[j]);
      }
    }
    keep(t, out);
  }
}

// q in lanes 0 … 15 of a warp, k in the others; every warp has eight tokens.
template <int Dk>
__device__ __forceinline__ void convolve_keys(const GatedDeltaNetParams& p, const Head& head, Place at,
                                              BFloat16* shared) {
  constexpr int kTokens = kChunkTokens / (kLocalThreads / kWarpSize);
  const int lane = threadIdx.x % kWarpSize, first = threadIdx.x / kWarpSize * kTokens;
  const bool is_key = lane >= kWarpSize / 2;
  const int column = lane % (kWarpSize / 2) * kChunk;
  const int channel = ((is_key ? p.key_heads : 0) + head.key_head) * p.key_dim + column;
  const float scale = is_key ? 1.0f : rsqrtf(float(p.key_dim));
  const int high_part = is_key ? kKeyHigh : kQueryHigh;
  BFloat16* out = workspace_of(p).key_part(p, at, head.key_head, high_part) + column;
  const Tile<Dk> tile{shared + high_part * kChunkTokens * Dk};
  const auto keep = [&](int t, const Chunk& values) {
    const float factor = rsqrtf(warp_sum(dot(values, values, 0.0f), kWarpSize / 2) + kUnitEps) * scale;
    if (column >= Dk) return;
    Chunk high, low;
    UNROLL
    for (int j = 0; j < kChunk; j++) {
      high.at[j] = values.at[j] * factor;
      low.at[j] = low_part(high.at[j]);
    }
    const auto keep_part = [&](const Chunk& part, int offset) {
      put_chunk(Tile<Dk>{tile.values + offset}, first + t, column, pack(BFloat16{}, part));
      store_chunk(out + offset + (first + t) * Dk, part);
    };
    keep_part(high, 0);
    keep_part(low, kChunkTokens * Dk);
  };
  convolve_eight(p, head, at.chunk * kChunkTokens + first, kTokens, channel, column < p.key_dim, keep);
}

__device__ __forceinline__ void convolve_values(const GatedDeltaNetParams& p, const Head& head, Place at) {
  const int columns = head.heads_per_key * p.value_dim / kChunk;
  for (int i = threadIdx.x; i < columns * (kChunkTokens / kValueTokens); i += kLocalThreads) {
    const int place = i % columns * kChunk, first = i / columns * kValueTokens;
    const int value_head = head.value_head + place / p.value_dim;
    BFloat16* out = workspace_of(p).value_rows(p, at, value_head) + size_t(first) * p.value_dim + place % p.value_dim;
    const int channel = 2 * p.key_heads * p.key_dim + head.value_head * p.value_dim + place;
    convolve_eight(p, head, at.chunk * kChunkTokens + first, kValueTokens, channel, true,
                   [&](int t, const Chunk& values) { store_chunk(out + t * p.value_dim, values); });
  }
}

// --- gates ------------------------------------------------------------------------------------------

// A sum kept as two floats.
struct Sum {
  float high, low;
};

__device__ __forceinline__ Sum add(Sum a, Sum b) {
  const float sum = a.high + b.high, taken = sum - a.high;
  const float rest = (a.high - (sum - taken)) + (b.high - taken) + (a.low + b.low);
  const float high = sum + rest;
  return {high, rest - (high - sum)};
}

// Running sums of a value head's log decays, and its betas.
struct Gates {
  float high[kChunkTokens], low[kChunkTokens], beta[kChunkTokens];

  // exp of the log decays after token s up to t, for s <= t.
  __device__ float decay(int s, int t) const {
    return expf(fminf((high[t] - high[s]) + (low[t] - low[s]), 0.0f));
  }
};

__device__ __forceinline__ float log_decay(const GatedDeltaNetParams& p, const Head& head, int token, int value_head) {
  if (token >= head.count) return 0.0f;
  const size_t place = (size_t(head.row) * p.steps + token) * p.value_heads + value_head;
  const float a = load(static_cast<const BFloat16*>(p.a) + place) + load(&p.dt_bias[value_head]);
  return fmaxf(-expf(load(&p.A_log[value_head])) * softplus(a), kLowestDecay);
}

__device__ __forceinline__ float beta_of(const GatedDeltaNetParams& p, const Head& head, int token, int value_head) {
  if (token >= head.count) return 0.0f;
  const size_t place = (size_t(head.row) * p.steps + token) * p.value_heads + value_head;
  return sigmoid(load(static_cast<const BFloat16*>(p.b) + place));
}

// By one warp; a lane has two neighbouring tokens.
__device__ __forceinline__ void make_gates(const GatedDeltaNetParams& p, const Head& head, Place at, int value_head,
                                           Gates& gates) {
  const int lane = threadIdx.x % kWarpSize, token = at.chunk * kChunkTokens + 2 * lane;
  const Sum mine{log_decay(p, head, token, value_head), 0.0f};
  const Sum next{log_decay(p, head, token + 1, value_head), 0.0f};
  Sum sum = add(mine, next);
  for (int by = 1; by < kWarpSize; by *= 2) {
    const Sum before{__shfl_up_sync(kAllLanes, sum.high, by), __shfl_up_sync(kAllLanes, sum.low, by)};
    if (lane >= by) sum = add(before, sum);
  }
  Sum first{__shfl_up_sync(kAllLanes, sum.high, 1), __shfl_up_sync(kAllLanes, sum.low, 1)};
  first = lane == 0 ? mine : add(first, mine);
  gates.high[2 * lane] = first.high, gates.high[2 * lane + 1] = sum.high;
  gates.low[2 * lane] = first.low, gates.low[2 * lane + 1] = sum.low;
  gates.beta[2 * lane] = beta_of(p, head, token, value_head);
  gates.beta[2 * lane + 1] = beta_of(p, head, token + 1, value_head);
  __syncwarp();
  float* out = workspace_of(p).gate_part(p, at, value_head, 0);
  for (int t = lane; t < kChunkTokens; t += kWarpSize) {
    store(out + kStartDecay * kChunkTokens + t, expf(fminf(gates.high[t] + gates.low[t], 0.0f)));
    store(out + kEndDecay * kChunkTokens + t, gates.decay(t, kChunkTokens - 1));
    store(out + kBeta * kChunkTokens + t, gates.beta[t]);
  }
}

// --- the triangular system --------------------------------------------------------------------------

// This warp's 16 rows of k . k (warps 0 … 3) or q . k (warps 4 … 7), up to the diagonal.
template <int Dk>
__device__ __forceinline__ void multiply_keys(const BFloat16* shared, float (&sums)[2 * 4][4]) {
  const int warp = threadIdx.x / kWarpSize, rows = warp % 4;
  const auto tile = [&](int part) { return Tile<Dk>{const_cast<BFloat16*>(shared) + part * kChunkTokens * Dk}; };
  const int left = warp < 4 ? kKeyHigh : kQueryHigh;
  NO_UNROLL
  for (int k = 0; k < Dk; k += kMmaDepth) {
    uint32_t high[4], low[4];
    load_a(high, tile(left).from_row(rows * kBlockTokens), k);
    load_a(low, tile(left + 1).from_row(rows * kBlockTokens), k);
    UNROLL
    for (int n = 0; n < 4; n++) {
      if (n > rows) continue;
      uint32_t key_high[2][2], key_low[2][2];
      load_b(key_high, tile(kKeyHigh).from_row(n * kBlockTokens), k);
      load_b(key_low, tile(kKeyLow).from_row(n * kBlockTokens), k);
      UNROLL
      for (int h = 0; h < 2; h++) mma_split(sums[2 * n + h], high, low, key_high[h], key_low[h]);
    }
  }
}

// A into `matrix`, from the rows of k . k; zeros beside it where triangle.h multiplies by whole blocks of 32.
__device__ __forceinline__ void make_system(const float (&sums)[2 * 4][4], const Gates& gates, float* matrix) {
  const int rows = threadIdx.x / kWarpSize;
  UNROLL
  for (int n = 0; n < 8; n++) {
    if (n / 4 > rows / 2) continue;
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int t = rows * kBlockTokens + accumulator_row(i), s = 8 * n + accumulator_column(i);
      matrix[t * kPitch + s] = s < t ? gates.beta[t] * gates.decay(s, t) * sums[n][i] : 0.0f;
    }
  }
}

// P into the workspace, from the rows of q . k.
__device__ __forceinline__ void keep_scores(const float (&sums)[2 * 4][4], const Gates& gates, BFloat16* out) {
  const int rows = threadIdx.x / kWarpSize - 4;
  UNROLL
  for (int n = 0; n < 8; n++) {
    if (n / 2 > rows) continue;
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      const int t = rows * kBlockTokens + accumulator_row(i), s = 8 * n + accumulator_column(i);
      const float2 values = make_float2(s <= t ? gates.decay(s, t) * sums[n][i] : 0.0f,
                                        s + 1 <= t ? gates.decay(s + 1, t) * sums[n][i + 1] : 0.0f);
      store_pair(out + t * kChunkTokens + s, values);
      store_pair(out + (kChunkTokens + t) * kChunkTokens + s, make_float2(low_part(values.x), low_part(values.y)));
    }
  }
}

// T into the workspace, by the matrix's 64 threads.
__device__ __forceinline__ void keep_inverse(const float* matrix, BFloat16* out, int thread) {
  constexpr int kUnits = kChunkTokens / kChunk;
  for (int i = thread; i < kChunkTokens * kUnits; i += kSolvers) {
    const int row = i / kUnits, column = i % kUnits * kChunk;
    if (column / kBlockTokens > row / kBlockTokens) continue;
    Chunk high, low;
    UNROLL
    for (int j = 0; j < kChunk; j++) {
      high.at[j] = matrix[row * kPitch + column + j];
      low.at[j] = low_part(high.at[j]);
    }
    store_chunk(out + row * kChunkTokens + column, high);
    store_chunk(out + (kChunkTokens + row) * kChunkTokens + column, low);
  }
}

// --- the kernel -------------------------------------------------------------------------------------

// Keys while they are multiplied, then the matrices.
template <int Dk>
constexpr size_t local_shared_bytes() {
  const size_t keys = kKeyParts * Tile<Dk>::bytes(kChunkTokens);
  const size_t matrices = sizeof(float) * kSystems * kOrder * kPitch;
  return keys > matrices ? keys : matrices;
}

// The chunk and key head (as its first value head) that a block works for. Called again where registers for what they say
// would have to be kept for long.
__device__ __forceinline__ Place local_place() { return {anew(blockIdx.z), anew(blockIdx.x)}; }
__device__ __forceinline__ Head local_head(const GatedDeltaNetParams& p) {
  return head_of(p, anew(blockIdx.y) * (p.value_heads / p.key_heads), anew(blockIdx.z));
}

// T and P of up to four value heads, from its value head `first` on.
__device__ __forceinline__ void solve(const GatedDeltaNetParams& p, int first, const float (&sums)[2 * 4][4],
                                      Gates (&gates)[kSystems], float* matrices) {
  const Head head = local_head(p);
  const Place at = local_place();
  const int count = min(kSystems, head.heads_per_key - first), value_head = head.value_head + first;
  const int index = anew(threadIdx.x), warp = index / kWarpSize, system = index / kSolvers, thread = index % kSolvers;
  if (warp < count) make_gates(p, head, at, value_head + warp, gates[warp]);
  __syncthreads();
  NO_UNROLL
  for (int i = 0; i < count; i++) {
    if (warp < 4) make_system(sums, gates[i], matrices + i * kOrder * kPitch);
    else keep_scores(sums, gates[i], workspace_of(p).mix_part(p, at, value_head + i, kScoresHigh));
  }
  __syncthreads();
  float* matrix = matrices + system * kOrder * kPitch;
  invert_triangle(matrix, thread, system < count);
  if (system < count) {
    keep_inverse(matrix, workspace_of(p).mix_part(p, local_place(), value_head + system, kInverseHigh), thread);
  }
  __syncthreads();
}

template <int Dk>
__global__ void __launch_bounds__(kLocalThreads, 2) chunk_local(GatedDeltaNetParams p) {
  SHARED_MEMORY(unsigned char, memory);
  SHARED_ARRAY(Gates, gates, [kSystems]);
  allow_next_launch();
  wait_for_previous_launch();
  const Head head = local_head(p);
  if (local_place().chunk * kChunkTokens >= head.count) return;
  auto* keys = reinterpret_cast<BFloat16*>(memory);  // while they are multiplied; then the matrices lie there
  convolve_keys<Dk>(p, head, local_place(), keys);
  convolve_values(p, head, local_place());
  __syncthreads();
  float sums[2 * 4][4] = {};
  multiply_keys<Dk>(keys, sums);
  __syncthreads();  // the keys are done with; and nothing of what follows is begun in between, for want of registers
  for (int first = 0; first < p.value_heads / p.key_heads; first += kSystems) {
    solve(p, first, sums, gates, reinterpret_cast<float*>(memory));
  }
}

}  // namespace flashnext::gated_delta_net
