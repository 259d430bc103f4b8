// For nvcc alone: accesses of known widths, and one kernel for each fault that scripts/check_kernels has to find.
#include "common/ptx.h"

extern "C" {

// Loads of 128, 64, 32, 16 and 8 bits and a copy of 128; stores of 128 and 32.
__global__ void known_widths(const float4* a, const float2* b, const float* c, const unsigned short* d,
                             const unsigned char* e, float4* sum, float* copied) {
  __shared__ float4 buffer[32];
  const int i = threadIdx.x;
  flashnext::copy_async(&buffer[i], a + 32 + i);
  flashnext::commit_copies();
  flashnext::wait_for_copies<0>();
  const float4 wide = a[i];
  const float2 half = b[i];
  sum[i] = {wide.x + half.x, wide.y + half.y, wide.z + c[i], wide.w + float(d[i] + e[i])};
  copied[i] = buffer[i].x;
}

// An array with an index that is known only while running: it cannot be in registers.
__global__ void local_array(const int* index, int* out) {
  int values[64] = {};
  for (int i = 0; i < 64; i++) values[index[i] & 63] += i;
  out[threadIdx.x] = values[index[threadIdx.x] & 63];
}

// More values at once than the registers that are left for a thread by the bounds.
__global__ void __launch_bounds__(1024, 2) spilled(const float* in, float* out) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; i++) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 96; i++) sum = sum * values[95 - i] + values[i];
  out[threadIdx.x] = sum;
}
}
