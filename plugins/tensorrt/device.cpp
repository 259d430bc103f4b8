// Memory and the clamp of integers, for nvcc and for the host execution.
#include "tensorrt/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/memory.h"
#include "common/platform.h"
#include "tensorrt/log.h"

namespace flashnext::trt {
namespace {

constexpr int kThreads = 256;

__global__ void clamp_values(int32_t* to, const int32_t* from, int count, Bounds bounds) {
  allow_next_launch();
  wait_for_previous_launch();
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  const int high = bounds.addend ? min(bounds.high, bounds.sum - load(&bounds.addend[i])) : bounds.high;
  store(&to[i], max(min(load(&from[i]), high), bounds.low));
}

#if defined(__CUDACC__)
void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Fault(std::string(what) + ": " + cudaGetErrorString(error));
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, bytes), "device memory");
  const cudaError_t error = cudaMemset(memory, 0, bytes);
  if (error != cudaSuccess) cudaFree(memory);
  require(error, "device memory");
  return memory;
}

void release(void* memory) { cudaFree(memory); }
#else
void* allocate(size_t bytes) {
  void* const memory = calloc(1, bytes);
  if (!memory) throw Fault("no memory for " + std::to_string(bytes) + " bytes");
  return memory;
}

void release(void* memory) { free(memory); }
#endif

}  // namespace

void copy(void* to, const void* from, size_t bytes, void* stream) {
#if defined(__CUDACC__)
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)), "copy");
#else
  (void)stream;
  memcpy(to, from, bytes);
#endif
}

DeviceMemory::~DeviceMemory() {
  for (void* block : blocks_) release(block);
}

void DeviceMemory::reserve(size_t bytes) {
  if (bytes <= size_) return;
  const size_t wanted = std::max(bytes, 2 * size_);
  blocks_.reserve(blocks_.size() + 1);
  blocks_.push_back(allocate(wanted));
  size_ = wanted;
}

void clamp(int32_t* to, const int32_t* from, int64_t count, const Bounds& bounds, void* stream) {
  if (count == 0) return;
  const dim3 grid(unsigned((count + kThreads - 1) / kThreads)), block(kThreads);
  const Status status = flashnext::launch(clamp_values, grid, block, 0, stream, to, from, int(count), bounds);
  if (!status) throw Fault(status.message);
}

}  // namespace flashnext::trt
