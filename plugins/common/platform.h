// The one place where nvcc and the host execution differ, apart from the PTX wrappers in common/ptx.h.
//
// Every kernel source includes this first and writes nothing that depends on the platform: launches go through
// `launch`, shared arrays through SHARED_ARRAY and SHARED_MEMORY, the dependency on the previous launch through
// `wait_for_previous_launch`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/status.h"

namespace flashnext {

// Shared memory of a block that no launch asks for; static and dynamic together.
constexpr size_t kSharedUnasked = 48 << 10;
// A launch asks for more dynamic memory than this: below it, a kernel's static arrays have 16 KB beside it.
constexpr size_t kDynamicUnasked = 32 << 10;

}  // namespace flashnext

#if defined(__CUDACC__)

#include <cuda_runtime.h>

// A static shared array: SHARED_ARRAY(float, parts, [8]).
#define SHARED_ARRAY(type, name, dimensions) __shared__ __align__(16) type name dimensions
// The block's dynamic shared memory.
#define SHARED_MEMORY(type, name)                                  \
  extern __shared__ __align__(1024) unsigned char shared_memory[]; \
  type* const name = reinterpret_cast<type*>(shared_memory)
#define UNROLL _Pragma("unroll")
#define NO_UNROLL _Pragma("unroll 1")  // where the loads of many rounds at once would take too many registers
#define CALL_SITE
#define ONLY_CALL_SITE

namespace flashnext {

using Stream = cudaStream_t;

// Weights may be loaded before this; everything that another launch writes only after it. Every kernel calls it, so a
// launch that has passed it knows that all earlier launches are complete.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// From here on the next launch may start and load its weights.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same value, but what is made from it inside a loop is made anew in every round, not kept in registers throughout.
__device__ __forceinline__ int anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

inline Status cuda_status(cudaError_t error) {
  return error == cudaSuccess ? Status{} : Status{kFailed, cudaGetErrorString(error)};
}

// Whether the current device has programmatic dependent launch (compute capability 9.0); older ones know no such attribute.
inline bool can_overlap() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

// Programmatic dependent launch: the kernel may start while its predecessor on the stream ends.
template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
              Arguments&&... arguments) {
  if (shared_bytes > kDynamicUnasked) {
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, int(shared_bytes));
    if (error != cudaSuccess) return cuda_status(error);
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<Stream>(stream);
  config.attrs = &overlap;
  config.numAttrs = can_overlap() ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

}  // namespace flashnext

#else

#include <tuple>
#include <type_traits>
#include <utility>

#include "host/cuda_on_cpu.h"

// The array is shared by all threads because the threads are fibers of one; its poison is renewed for every block.
#define SHARED_ARRAY(type, name, dimensions)                      \
  static __attribute__((aligned(16))) type name dimensions;       \
  static const ::simt::SharedArray registered_##name(name, sizeof name)
#define SHARED_MEMORY(type, name) type* const name = static_cast<type*>(::simt::dynamic_shared())
#define UNROLL
#define NO_UNROLL
// A defaulted last parameter: from where in the kernel a collective is called.
#define CALL_SITE , SIMT_LOCATION
#define ONLY_CALL_SITE SIMT_LOCATION

namespace flashnext {

inline void wait_for_previous_launch() {}
inline void allow_next_launch() {}
inline int anew(int value) { return value; }

template <class... Parameters, class... Arguments>
Status launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*,
              Arguments&&... arguments) {
  const std::tuple<std::decay_t<Parameters>...> given(static_cast<Parameters>(arguments)...);
  // By value, as a launch does: every thread has its own copy.
  auto body = [&] { std::apply(kernel, std::tuple(given)); };
  using BodyType = decltype(body);
  const auto run = [](void* closure) { (*static_cast<BodyType*>(closure))(); };
  const void* const name = reinterpret_cast<const void*>(kernel);
  const char* wrong = simt::run_grid(name, grid, block, shared_bytes, run, &body);
  const size_t together = simt::static_shared_bytes(name) + shared_bytes;
  if (!wrong && together > (shared_bytes <= kDynamicUnasked ? kSharedUnasked : simt::kSharedLimit)) {
    wrong = "more shared memory, static and dynamic together, than such a launch gets on every target";
  }
  return wrong ? Status{kFailed, wrong} : Status{};
}

}  // namespace flashnext

#endif
