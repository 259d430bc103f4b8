// The few things that plugins do with a device's memory themselves. On the host execution it is the host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashnext::trt {

// Queues a copy within the device. Fault: it cannot.
void copy(void* to, const void* from, size_t bytes, void* stream);

// Memory that grows, and that keeps what it had: a CUDA graph may still hold the address. Freed with the object.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();

  // At least so many bytes, zeros when new. Not to be called where a stream is captured. Fault: there is no memory.
  void reserve(size_t bytes);
  void* data() const { return blocks_.empty() ? nullptr : blocks_.back(); }
  size_t size() const { return size_; }

 private:
  std::vector<void*> blocks_;
  size_t size_ = 0;
};

// Bounds of integers; with an addend for each, `sum` bounds both together.
struct Bounds {
  int32_t low, high;
  const int32_t* addend;
  int32_t sum;
};

// to[i] = from[i], held to the bounds. Fault: the launch failed.
void clamp(int32_t* to, const int32_t* from, int64_t count, const Bounds& bounds, void* stream);

}  // namespace flashnext::trt
