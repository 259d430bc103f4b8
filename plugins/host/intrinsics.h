// CUDA's atomics and the small device functions that kernels use, for the host.
//
// Atomics are real, relaxed ones: ThreadSanitizer tells them from plain accesses. The approximate functions are the exact
// ones here, so results differ from a GPU's in the last bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace simt {

template <class T, class F>
T atomic_update(T* pointer, F change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  auto* bits = reinterpret_cast<Bits*>(pointer);
  Bits old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED);
  for (;;) {
    const T old = __builtin_bit_cast(T, old_bits);
    const Bits wanted = __builtin_bit_cast(Bits, static_cast<T>(change(old)));
    if (__atomic_compare_exchange_n(bits, &old_bits, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return old;
  }
}

}  // namespace simt

template <class T>
T atomicAdd(T* pointer, std::type_identity_t<T> value) {
  return simt::atomic_update(pointer, [&](T old) { return old + value; });
}
inline unsigned atomicInc(unsigned* pointer, unsigned limit) {
  return simt::atomic_update(pointer, [&](unsigned old) { return old >= limit ? 0u : old + 1; });
}
template <class T>
T atomicOr(T* pointer, std::type_identity_t<T> value) {
  return simt::atomic_update(pointer, [&](T old) { return old | value; });
}
template <class T>
T atomicMax(T* pointer, std::type_identity_t<T> value) {
  return simt::atomic_update(pointer, [&](T old) { return old < value ? value : old; });
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
