// Tensor core products, ldmatrix, cp.async and named barriers: the only inline PTX, each with its twin for the host.
//
// The twins gather the fragments of all lanes, multiply in double and round once, so a wrong fragment layout in a kernel
// gives wrong numbers here as it does on a GPU. Layouts are those of the PTX manual (m16n8k16, row.col).
#pragma once

#include "common/dtypes.h"

namespace flashnext {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
#if defined(__CUDACC__)
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#else
  return simt::shared_address(pointer);
#endif
}

#if !defined(__CUDACC__)
}  // namespace flashnext
#include "host/tensor_core.h"
namespace flashnext {
#endif

// d = a * b + c; a [16, 16] BF16 row-major, b [16, 8] BF16 column-major, c and d [16, 8] float.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         const float (&c)[4] CALL_SITE) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
  simt::mma_bf16(d, a, b, c, location);
#endif
}

// Four 8x8 matrices of 16-bit values; lane l names the row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row_address CALL_SITE) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
#else
  simt::load_matrices(r, row_address, false, location);
#endif
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_address CALL_SITE) {
#if defined(__CUDACC__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
#else
  simt::load_matrices(r, row_address, true, location);
#endif
}

// Four bytes of the eight in `low` and `high`: a nibble of `selector` names one; its top bit repeats the byte's sign
// over it.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDACC__)
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
#else
  uint32_t bytes = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t nibble = selector >> 4 * i & 0xF;
    const uint8_t byte = uint8_t((nibble & 4 ? high : low) >> 8 * (nibble & 3));
    bytes |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return bytes;
#endif
}

// Copies 16 bytes from global to shared memory in the background; those from `source_bytes` on become zero.
__device__ __forceinline__ void copy_async(void* to, const void* from, int source_bytes = 16 CALL_SITE) {
#if defined(__CUDACC__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(source_bytes)
               : "memory");
#else
  if (source_bytes) simt::note_load(from, size_t(source_bytes));
  simt::copy_async(to, from, 16, source_bytes, location);
#endif
}

__device__ __forceinline__ void commit_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  simt::copy_commit();
#endif
}

// Waits until at most `Left` of this thread's groups are under way.
template <int Left>
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
#else
  simt::copy_wait(Left);
#endif
}

__device__ __forceinline__ void named_barrier(int id, int threads CALL_SITE) {
#if defined(__CUDACC__)
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  simt::barrier(id, threads, true, "bar.sync", location);
#endif
}

}  // namespace flashnext
