// Zero-centred RMSNorm and partial RoPE of one head, by a warp.
//
// The angle is the float product of position and frequency, as the reference takes it, up to some millions of radians.
// CUDA's sincosf reduces such arguments in local memory; here three parts of pi/2 and fused products do it: the reduced
// angle is right to 2^-24 for up to 2^22 quarter turns.
#pragma once

#include "common/memory.h"
#include "common/reduce.h"

namespace flashnext {

struct SinCos {
  float sin, cos;
};

__device__ __forceinline__ SinCos sine_cosine(float angle) {
  const float turns = rintf(angle * 0.636619772f);  // quarter turns
  float x = fmaf(turns, -1.57079637e+00f, angle);
  x = fmaf(turns, 4.37113883e-08f, x);
  x = fmaf(turns, 1.71512489e-15f, x);
  const float square = x * x;
  // Minimax polynomials on [-pi/4, pi/4] (those of the Cephes library).
  float sine = fmaf(square, -1.9515295891e-4f, 8.3321608736e-3f);
  sine = fmaf(square, sine, -1.6666654611e-1f);
  sine = fmaf(square * x, sine, x);
  float cosine = fmaf(square, 2.443315711809948e-5f, -1.388731625493765e-3f);
  cosine = fmaf(square, cosine, 4.166664568298827e-2f);
  cosine = fmaf(square * square, cosine, fmaf(square, -0.5f, 1.0f));
  const int quarter = int(turns) & 3;
  const float s = quarter & 1 ? cosine : sine, c = quarter & 1 ? sine : cosine;
  return {quarter & 2 ? -s : s, (quarter + 1) & 2 ? -c : c};
}

struct Rotation {
  const float* inv_freq;  // [frequencies]
  int frequencies;        // 2 * frequencies columns turn
  float scale;            // of cos and sin
};

// Columns lane, lane + 32, … of x / rms(x) * (1 + weight), into the warp's `buffer` in shared memory. `x(i)` gives column i.
template <class T, class Source>
__device__ __forceinline__ void normalise_head(Source x, const T* weight, int columns, float eps, float* buffer) {
  const int lane = threadIdx.x % kWarpSize;
  float square = 0.0f;
  for (int i = lane; i < columns; i += kWarpSize) {
    buffer[i] = x(i);
    square += buffer[i] * buffer[i];
  }
  const float factor = rsqrtf(warp_sum(square) / columns + eps);
  for (int i = lane; i < columns; i += kWarpSize) buffer[i] *= factor * (1.0f + load(weight + i));
  __syncwarp();
}

// The head in the warp's `buffer`, turned in place: column i turns with column i + frequencies.
__device__ __forceinline__ void rotate_head(float* buffer, int position, const Rotation& rotation) {
  const int half = rotation.frequencies;
  for (int i = threadIdx.x % kWarpSize; i < half; i += kWarpSize) {
    const SinCos turn = sine_cosine(float(position) * load(&rotation.inv_freq[i]));
    const float low = buffer[i], high = buffer[i + half];
    buffer[i] = (low * turn.cos - high * turn.sin) * rotation.scale;
    buffer[i + half] = (high * turn.cos + low * turn.sin) * rotation.scale;
  }
  __syncwarp();
}

}  // namespace flashnext
