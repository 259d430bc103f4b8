// GatedDeltaNet, token by token. A block is one value head of one sequence and holds its state [128, 128] in registers:
// read once, written once per step, whatever the number of tokens.
//
// Pending tokens. The state that is written back is the one after the accepted pending tokens; the new tokens change only
// the registers, and their k, v, decay and beta replace the old ones in pending_state. The blocks of one key head all
// read its old pending keys, so the last of them to have done so writes the new ones: each draws a ticket, and nobody
// waits. All computed the same keys, so it does not matter who that is.
#include "gated_delta_net/kernel.h"

#include "abi.h"
#include "gated_delta_net/chunk_finish.h"
#include "gated_delta_net/chunk_local.h"
#include "gated_delta_net/chunk_state.h"
#include "gated_delta_net/recurrence.h"

namespace flashnext {
namespace gated_delta_net {
namespace {

constexpr int kMaxThreads = kMaxDim / kWarpColumns * kWarpSize;

// Whether the ring has room for the new inputs beside those that other blocks still read.
__device__ __host__ inline bool ring_has_room(const GatedDeltaNetParams& p) {
  return p.ring >= p.steps + p.width - 1;
}

// True in all threads of the last block of the key head to get here.
__device__ __forceinline__ bool last_of_key(const GatedDeltaNetParams& p, const Head& head, int* shared) {
  if (threadIdx.x == 0) {
    __threadfence();
    // Wraps to 0 with the last ticket: the next launch finds zeros again.
    *shared = int(atomicInc(reinterpret_cast<unsigned*>(&p.tickets[head.row * p.key_heads + head.key_head]),
                            unsigned(head.heads_per_key - 1)));
  }
  __syncthreads();
  return *shared == head.heads_per_key - 1;
}

template <int Slices>
__device__ __forceinline__ void commit_pending(const GatedDeltaNetParams& p, const Head& head, Staged& staged,
                                               State<Slices>& state) {
  float unused[kLaneColumns];
  for (int first = 0; first < head.kept; first += kTile) {
    const int count = min(kTile, head.kept - first);
    stage_pending(p, head, first, count, staged);
    __syncthreads();
    for (int t = 0; t < count; t++) apply_token<false>(p, staged, t, state, unused);
    __syncthreads();
  }
}

// Gated RMSNorm of the tile's outputs; a warp per token. `y` [kTile][kMaxDim] in shared memory.
template <class T>
__device__ __forceinline__ void write_outputs(const GatedDeltaNetParams& p, const Head& head, int first, int count,
                                              const float (*y)[kMaxDim]) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  for (int t = warp; t < count; t += warps) {
    float square = 0.0f;
    for (int i = lane; i < p.value_dim; i += kWarpSize) square += y[t][i] * y[t][i];
    const float factor = rsqrtf(warp_sum(square) / p.value_dim + p.eps);
    const size_t token = size_t(head.row) * p.steps + first + t;
    const size_t place = (token * p.value_heads + head.value_head) * p.value_dim;
    for (int i = lane; i < p.value_dim; i += kWarpSize) {
      const float z = load(static_cast<const T*>(p.z) + place + i);
      const float gate = p.silu_gate ? silu(z) : sigmoid(z);
      store(static_cast<T*>(p.y) + place + i, load(&p.norm_weight[i]) * y[t][i] * factor * gate);
    }
  }
}

// Tokens from new_len on have no output of their own: zeros.
template <class T>
__device__ __forceinline__ void clear_outputs(const GatedDeltaNetParams& p, const Head& head) {
  for (int t = head.count; t < p.steps; t++) {
    const size_t token = size_t(head.row) * p.steps + t;
    T* out = static_cast<T*>(p.y) + (token * p.value_heads + head.value_head) * p.value_dim;
    for (int i = threadIdx.x; i < p.value_dim; i += blockDim.x) store(out + i, 0.0f);
  }
}

template <class T, class U, int Slices>
__global__ void __launch_bounds__(kMaxThreads, 1) step(GatedDeltaNetParams p) {
  SHARED_ARRAY(Staged, staged, [1]);
  SHARED_ARRAY(float, y, [kTile][kMaxDim]);
  SHARED_ARRAY(int, ticket, [1]);
  allow_next_launch();
  wait_for_previous_launch();
  const Head head = head_of(p, blockIdx.x, blockIdx.y);
  clear_outputs<T>(p, head);
  if (head.count == 0) return;
  const bool stays_pending = p.steps <= p.window;
  State<Slices> state;
  load_state<U>(p, head, state);
  commit_pending(p, head, *staged, state);
  // Nothing accepted: the memory holds this state already.
  if (stays_pending && (head.kept > 0 || head.past == 0)) store_state<U>(p, head, state);
  const bool keeps_key = stays_pending && last_of_key(p, head, ticket);
  for (int first = 0; first < head.count; first += kTile) {
    const int count = min(kTile, head.count - first);
    convolve<T>(p, head, first, count, *staged);
    stage_gates<T>(p, head, first, count, *staged);
    __syncthreads();
    normalise(p, count, *staged);
    __syncthreads();
    if (stays_pending) keep_pending(p, head, first, count, keeps_key, *staged);
    for (int t = 0; t < count; t++) {
      float out[kLaneColumns];
      apply_token<true>(p, *staged, t, state, out);
      if (threadIdx.x % kWarpSize < kWarpColumns / kLaneColumns) {
        UNROLL
        for (int j = 0; j < kLaneColumns; j++) y[t][state_column() + j] = out[j];
      }
    }
    __syncthreads();
    write_outputs<T>(p, head, first, count, y);
  }
  if (!stays_pending) store_state<U>(p, head, state);
  if (ring_has_room(p)) keep_conv_inputs<T>(p, head, 0);
}

// The ring's part of a long step, once nobody reads the old inputs any more: its last `ring` tokens.
template <class T>
__global__ void __launch_bounds__(256) keep_ring(GatedDeltaNetParams p) {
  allow_next_launch();
  wait_for_previous_launch();
  Head head{};
  head.row = blockIdx.z;
  head.slot = load(&p.slots[head.row]);
  head.past = load(&p.past_len[head.row]);
  head.count = load(&p.new_len[head.row]);
  const int token = head.count - 1 - int(blockIdx.y), channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (token >= 0 && channel < p.channels) keep_conv_input<T>(p, head, token, channel);
}

// --- launch -----------------------------------------------------------------------------------------

// Whether a step goes by chunks. Channels come eight at a time there.
bool by_chunks(const GatedDeltaNetParams& p) {
  return p.T == kBFloat16 && p.steps > p.window && p.key_dim % kChunk == 0;
}

template <class U, int Dk>
Status launch_chunks(const GatedDeltaNetParams& p) {
  const dim3 chunks(chunk_count(p), p.key_heads, p.batch);
  Status status = launch(chunk_local<Dk>, chunks, dim3(kLocalThreads), local_shared_bytes<Dk>(), p.stream, p);
  if (!status) return status;
  const dim3 heads(p.value_heads * ((p.value_dim + kBlockValues - 1) / kBlockValues), p.batch);
  status = launch(chunk_state<U, Dk>, heads, dim3(kStateThreads), Operands<Dk>::bytes(), p.stream, p);
  if (!status) return status;
  const dim3 finish((p.steps * p.value_heads + kFinishHeads - 1) / kFinishHeads, p.batch);
  return launch(chunk_finish, finish, dim3(kFinishThreads), 0, p.stream, p);
}

template <class T, class U, int Slices>
Status launch_tokens(const GatedDeltaNetParams& p) {
  if (!p.tickets) return rejected("GatedDeltaNet: tickets must be an array of zeros");
  const dim3 threads(p.value_dim / kWarpColumns * kWarpSize);
  const Status status = launch(step<T, U, Slices>, dim3(p.value_heads, p.batch), threads, 0, p.stream, p);
  if (!status || ring_has_room(p)) return status;
  const dim3 grid((p.channels + 255) / 256, p.ring < p.steps ? p.ring : p.steps, p.batch);
  return launch(keep_ring<T>, grid, dim3(256), 0, p.stream, p);
}

template <class T, class U>
Status launch_format(const GatedDeltaNetParams& p) {
  const bool small = p.key_dim <= kSmallKey;
  if (by_chunks(p)) return small ? launch_chunks<U, kSmallKey>(p) : launch_chunks<U, kMaxDim>(p);
  constexpr int kSmallSlices = kSmallKey / kRowLanes, kSlices = kMaxDim / kRowLanes;
  return small ? launch_tokens<T, U, kSmallSlices>(p) : launch_tokens<T, U, kSlices>(p);
}

template <class T>
Status launch_state_format(const GatedDeltaNetParams& p) {
  if (p.U == kFloat32) return launch_format<T, Float32>(p);
  if (p.U == kBFloat16) return launch_format<T, BFloat16>(p);
  return rejected("GatedDeltaNet: no kernel for a state in this format");
}

Status check(const GatedDeltaNetParams& p) {
  if (p.key_heads < 1 || p.value_heads % p.key_heads) {
    return rejected("GatedDeltaNet: value_heads must be a multiple of key_heads");
  }
  if (p.key_dim < 1 || p.key_dim > kMaxDim) return rejected("GatedDeltaNet: key_dim must be at most 128");
  if (p.value_dim < kWarpColumns || p.value_dim % kWarpColumns || p.value_dim > kMaxDim) {
    return rejected("GatedDeltaNet: value_dim must be a multiple of 8, at most 128");
  }
  if (p.width < 1 || p.width > kTaps) return rejected("GatedDeltaNet: the convolution must be 1 to 4 wide");
  if (p.ring < p.width - 1) return rejected("GatedDeltaNet: the ring must hold the convolution's width - 1 inputs");
  if (p.channels != 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim) {
    return rejected("GatedDeltaNet: qkv must have 2*K*Dk + V*Dv channels");
  }
  if (p.pending_columns != p.key_heads * p.key_dim + p.value_heads * (p.value_dim + 2)) {
    return rejected("GatedDeltaNet: pending_state must have K*Dk + V*Dv + 2*V columns");
  }
  return {};
}

}  // namespace
}  // namespace gated_delta_net

int64_t workspace_bytes(const GatedDeltaNetParams& p) {
  int64_t bytes = 0;
  if (gated_delta_net::by_chunks(p)) gated_delta_net::workspace_of(p, &bytes);
  return bytes;
}

Status launch(const GatedDeltaNetParams& p) {
  const Status status = gated_delta_net::check(p);
  if (!status || p.batch == 0 || p.steps == 0) return status;
  if (p.T == kFloat32) return gated_delta_net::launch_state_format<Float32>(p);
  if (p.T == kBFloat16) return gated_delta_net::launch_state_format<BFloat16>(p);
  return rejected("GatedDeltaNet: no kernel for this format");
}

REGISTER_OP(gated_delta_net, GatedDeltaNetParams);

}  // namespace flashnext
