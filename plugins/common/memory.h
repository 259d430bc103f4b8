// Global memory: the only functions through which kernels read and write it.
//
// One value, or `Chunk` of eight: 16 bytes of BF16, 32 of float, 8 of FP8. Eight is the unit of every column loop, so
// official sizes and any multiple of eight work in every format. On the host the same functions count bytes and sectors.
#pragma once

#include "common/dtypes.h"

namespace flashnext {

constexpr int kChunk = 8;

struct Chunk {
  float at[kChunk];
};

#if defined(__CUDACC__)
#define NOTE_LOAD(pointer, bytes)
#define NOTE_STORE(pointer, bytes)
#else
#define NOTE_LOAD(pointer, bytes) ::simt::note_load(pointer, bytes)
#define NOTE_STORE(pointer, bytes) ::simt::note_store(pointer, bytes)
#endif

template <class T>
__device__ __forceinline__ float load(const T* pointer) {
  NOTE_LOAD(pointer, sizeof(T));
  return to_float(*pointer);
}

__device__ __forceinline__ int load(const int* pointer) {
  NOTE_LOAD(pointer, sizeof(int));
  return *pointer;
}

__device__ __forceinline__ float load(const float* pointer) {
  NOTE_LOAD(pointer, sizeof(float));
  return *pointer;
}

template <class T>
__device__ __forceinline__ void store(T* pointer, float value) {
  NOTE_STORE(pointer, sizeof(T));
  *pointer = from_float<T>(value);
}

__device__ __forceinline__ void store(float* pointer, float value) {
  NOTE_STORE(pointer, sizeof(float));
  *pointer = value;
}

__device__ __forceinline__ void store(int* pointer, int value) {
  NOTE_STORE(pointer, sizeof(int));
  *pointer = value;
}

// A store to what other blocks of the launch read, after they have: the caller has seen to that (by tickets, say).
__device__ __forceinline__ void store_ordered(float* pointer, float value) {
#if !defined(__CUDACC__)
  simt::note_ordered_store(pointer, sizeof(float));
#endif
  *pointer = value;
}

// As it will be read back from storage in format T.
template <class T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

__device__ __forceinline__ float2 load_pair(const Float32* pointer) {
  NOTE_LOAD(pointer, sizeof(float2));
  return *reinterpret_cast<const float2*>(pointer);
}

__device__ __forceinline__ float2 load_pair(const BFloat16* pointer) {
  NOTE_LOAD(pointer, sizeof(uint32_t));
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(pointer);
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

__device__ __forceinline__ float2 load_pair(const Float8E4M3* pointer) {
  NOTE_LOAD(pointer, sizeof(uint16_t));
  return two_to_float(*reinterpret_cast<const uint16_t*>(pointer));
}

__device__ __forceinline__ void store_pair(Float32* pointer, float2 values) {
  NOTE_STORE(pointer, sizeof(float2));
  // As one integer: two floats in registers that are no neighbours would be stored one by one.
  *reinterpret_cast<uint64_t*>(pointer) = uint64_t(__float_as_uint(values.y)) << 32 | __float_as_uint(values.x);
}

__device__ __forceinline__ void store_pair(BFloat16* pointer, float2 values) {
  NOTE_STORE(pointer, sizeof(uint32_t));
  const uint32_t low = from_float<BFloat16>(values.x).bits, high = from_float<BFloat16>(values.y).bits;
  *reinterpret_cast<uint32_t*>(pointer) = low | high << 16;
}

__device__ __forceinline__ float4 load_four(const float* pointer) {
  NOTE_LOAD(pointer, sizeof(float4));
  return *reinterpret_cast<const float4*>(pointer);
}

__device__ __forceinline__ void store_four(float* pointer, float4 values) {
  NOTE_STORE(pointer, sizeof(float4));
  *reinterpret_cast<float4*>(pointer) = values;
}

__device__ __forceinline__ float4 load_four(const Float32* pointer) {
  return load_four(reinterpret_cast<const float*>(pointer));
}

__device__ __forceinline__ void store_four(Float32* pointer, float4 values) {
  store_four(reinterpret_cast<float*>(pointer), values);
}

__device__ __forceinline__ float4 load_four(const BFloat16* pointer) {
  NOTE_LOAD(pointer, sizeof(uint2));
  const uint2 bits = *reinterpret_cast<const uint2*>(pointer);
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u), __uint_as_float(bits.y << 16),
                     __uint_as_float(bits.y & 0xFFFF0000u));
}

__device__ __forceinline__ void store_four(BFloat16* pointer, float4 values) {
  NOTE_STORE(pointer, sizeof(uint2));
  uint2 bits;
  bits.x = from_float<BFloat16>(values.x).bits | uint32_t(from_float<BFloat16>(values.y).bits) << 16;
  bits.y = from_float<BFloat16>(values.z).bits | uint32_t(from_float<BFloat16>(values.w).bits) << 16;
  *reinterpret_cast<uint2*>(pointer) = bits;
}

// --- eight values, as they lie in memory -------------------------------------------------------------

// Kept packed between the load and the use, so that many loads in flight take few registers.
template <class T>
struct Packed;
template <>
struct Packed<Float32> {
  float4 low, high;
};
template <>
struct Packed<BFloat16> {
  uint4 bits;
};
template <>
struct Packed<Float8E4M3> {
  uint2 bits;
};

// Keeps the compiler from unpacking ahead of a loop, which would take two to four times the registers.
__device__ __forceinline__ void keep_packed(unsigned& word) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(word));
#else
  (void)word;
#endif
}
__device__ __forceinline__ void keep_packed(Packed<Float32>&) {}
__device__ __forceinline__ void keep_packed(Packed<BFloat16>& p) {
  keep_packed(p.bits.x);
  keep_packed(p.bits.y);
  keep_packed(p.bits.z);
  keep_packed(p.bits.w);
}
__device__ __forceinline__ void keep_packed(Packed<Float8E4M3>& p) {
  keep_packed(p.bits.x);
  keep_packed(p.bits.y);
}

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* pointer) {
  NOTE_LOAD(pointer, kChunk * sizeof(T));
  return *reinterpret_cast<const Packed<T>*>(pointer);
}

template <class T>
__device__ __forceinline__ void store_packed(T* pointer, const Packed<T>& values) {
  NOTE_STORE(pointer, kChunk * sizeof(T));
  *reinterpret_cast<Packed<T>*>(pointer) = values;
}

__device__ __forceinline__ Chunk unpack(const Packed<Float32>& p) {
  return {p.low.x, p.low.y, p.low.z, p.low.w, p.high.x, p.high.y, p.high.z, p.high.w};
}

__device__ __forceinline__ Chunk unpack(const Packed<BFloat16>& p) {
  const uint32_t words[4] = {p.bits.x, p.bits.y, p.bits.z, p.bits.w};
  Chunk out;
  UNROLL
  for (int i = 0; i < 4; i++) {
    out.at[2 * i] = __uint_as_float(words[i] << 16);
    out.at[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return out;
}

__device__ __forceinline__ Chunk unpack(const Packed<Float8E4M3>& p) {
  const uint32_t words[2] = {p.bits.x, p.bits.y};
  Chunk out;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const float2 pair = two_to_float(uint16_t(words[i / 2] >> 16 * (i % 2)));
    out.at[2 * i] = pair.x;
    out.at[2 * i + 1] = pair.y;
  }
  return out;
}

template <class T>
__device__ __forceinline__ Chunk load_chunk(const T* pointer) {
  return unpack(load_packed(pointer));
}

__device__ __forceinline__ Packed<Float32> pack(Float32, const Chunk& c) {
  return {{c.at[0], c.at[1], c.at[2], c.at[3]}, {c.at[4], c.at[5], c.at[6], c.at[7]}};
}

__device__ __forceinline__ Packed<BFloat16> pack(BFloat16, const Chunk& c) {
  uint32_t words[4];
  UNROLL
  for (int i = 0; i < 4; i++) {
    words[i] = from_float<BFloat16>(c.at[2 * i]).bits | uint32_t(from_float<BFloat16>(c.at[2 * i + 1]).bits) << 16;
  }
  return {{words[0], words[1], words[2], words[3]}};
}

__device__ __forceinline__ Packed<Float8E4M3> pack(Float8E4M3, const Chunk& c) {
  uint32_t words[2] = {0, 0};
  UNROLL
  for (int i = 0; i < kChunk; i++) words[i / 4] |= uint32_t(from_float<Float8E4M3>(c.at[i]).bits) << 8 * (i % 4);
  return {{words[0], words[1]}};
}

template <class T>
__device__ __forceinline__ void store_chunk(T* pointer, const Chunk& values) {
  store_packed(pointer, pack(T{}, values));
}

__device__ __forceinline__ float dot(const Chunk& a, const Chunk& b, float sum) {
  UNROLL
  for (int i = 0; i < kChunk; i++) sum += a.at[i] * b.at[i];
  return sum;
}

}  // namespace flashnext
