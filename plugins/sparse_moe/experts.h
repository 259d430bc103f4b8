// Where the matrices of an expert are, in every format of the weights.
#pragma once

#include "common/weights.h"
#include "sparse_moe/params.h"

namespace flashnext::sparse_moe {

// Part 0: gate, 1: up. [inner, hidden]
template <class W>
__device__ __forceinline__ Matrix<W> gate_up(const SparseMoEParams& p, int expert, int part) {
  const size_t matrix = size_t(expert) * 2 + part;
  const size_t bytes = matrix * p.inner * p.hidden * 16 / Matrix<W>::kUnit;
  const char* values = static_cast<const char*>(p.gate_up_weight) + bytes;
  if constexpr (Matrix<W>::kUnit == 32) {
    const auto* groups = static_cast<const uint8_t*>(p.gate_up_group_scale);
    groups += matrix * p.inner * (p.hidden / kScaleGroup);
    return {values, p.hidden, groups, load(&p.gate_up_scale_2[matrix])};
  } else if constexpr (Matrix<W>::kUnit == 16) {
    const int down = (p.inner + kScaleBlock - 1) / kScaleBlock, across = (p.hidden + kScaleBlock - 1) / kScaleBlock;
    return {values, p.hidden, p.gate_up_scale + matrix * down * across};
  } else {
    return {values, p.hidden};
  }
}

// [hidden, inner]
template <class W>
__device__ __forceinline__ Matrix<W> down(const SparseMoEParams& p, int expert) {
  const size_t bytes = size_t(expert) * p.hidden * p.inner * 16 / Matrix<W>::kUnit;
  const char* values = static_cast<const char*>(p.down_weight) + bytes;
  if constexpr (Matrix<W>::kUnit == 32) {
    const auto* groups = static_cast<const uint8_t*>(p.down_group_scale);
    groups += size_t(expert) * p.hidden * (p.inner / kScaleGroup);
    return {values, p.inner, groups, load(&p.down_scale_2[expert])};
  } else if constexpr (Matrix<W>::kUnit == 16) {
    const int down = (p.hidden + kScaleBlock - 1) / kScaleBlock, across = (p.inner + kScaleBlock - 1) / kScaleBlock;
    return {values, p.inner, p.down_scale + size_t(expert) * down * across};
  } else {
    return {values, p.inner};
  }
}

}  // namespace flashnext::sparse_moe
