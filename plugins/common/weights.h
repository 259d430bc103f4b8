// Weight matrices in every storage format, read in units of 16 bytes.
//
// A unit is 4 float, 8 BF16, 16 E4M3 or 32 E2M1 values of one row. A lane loads many units first (`Loaded` keeps them
// packed) and multiplies later. The vector lies in shared memory as planes of float4: plane j holds values 4j … 4j + 3
// of every unit, so neighbouring lanes, which take neighbouring units, read neighbouring float4s.
//
// Quantized formats are those of the op table: E4M3 with a float scale per 128x128 block, and NVFP4 (E2M1 pairs, low
// nibble first, an E4M3 scale per 16 elements and a float one per matrix). Scales multiply a unit's or a group's sum.
#pragma once

#include "common/memory.h"

namespace flashnext {

struct Float4E2M1 {};  // names the format; its values come in pairs

constexpr int kScaleBlock = 128;
constexpr int kScaleGroup = 16;

__device__ __forceinline__ uint4 load_unit(const void* pointer) {
  NOTE_LOAD(pointer, sizeof(uint4));
  return *static_cast<const uint4*>(pointer);
}

__device__ __forceinline__ float dot_four(const float* weight, float4 x, float sum) {
  return sum + (weight[0] * x.x + weight[1] * x.y + weight[2] * x.z + weight[3] * x.w);
}

template <class W>
struct Matrix;

// --- plain ------------------------------------------------------------------------------------------

template <>
struct Matrix<Float32> {
  static constexpr int kUnit = 4;
  const void* values;
  int columns;
  struct Loaded {
    uint4 bits;
  };
  __device__ __forceinline__ Loaded load(int row, int unit) const {
    return {load_unit(static_cast<const float*>(values) + size_t(row) * columns + unit * kUnit)};
  }
  __device__ __forceinline__ static float dot(const Loaded& w, const float4* x, int) {
    const float weight[4] = {__uint_as_float(w.bits.x), __uint_as_float(w.bits.y), __uint_as_float(w.bits.z),
                             __uint_as_float(w.bits.w)};
    return dot_four(weight, x[0], 0.0f);
  }
};

template <>
struct Matrix<BFloat16> {
  static constexpr int kUnit = 8;
  const void* values;
  int columns;
  struct Loaded {
    uint4 bits;
  };
  __device__ __forceinline__ Loaded load(int row, int unit) const {
    return {load_unit(static_cast<const BFloat16*>(values) + size_t(row) * columns + unit * kUnit)};
  }
  __device__ __forceinline__ static float dot(const Loaded& w, const float4* x, int plane) {
    const Chunk weight = unpack(Packed<BFloat16>{w.bits});
    return dot_four(weight.at + 4, x[plane], dot_four(weight.at, x[0], 0.0f));
  }
};

// --- E4M3 with a scale per block --------------------------------------------------------------------

template <>
struct Matrix<Float8E4M3> {
  static constexpr int kUnit = 16;
  const void* values;
  int columns;
  const float* scale;  // [rows / 128, columns / 128], both rounded up
  struct Loaded {
    uint4 bits;
    float scale;
  };
  __device__ __forceinline__ Loaded load(int row, int unit) const {
    const int across = (columns + kScaleBlock - 1) / kScaleBlock;
    const float* place = scale + row / kScaleBlock * across + unit * kUnit / kScaleBlock;
    return {load_unit(static_cast<const uint8_t*>(values) + size_t(row) * columns + unit * kUnit),
            flashnext::load(place)};
  }
  __device__ __forceinline__ static float dot(const Loaded& w, const float4* x, int plane) {
    const Chunk low = unpack(Packed<Float8E4M3>{{w.bits.x, w.bits.y}});
    const Chunk high = unpack(Packed<Float8E4M3>{{w.bits.z, w.bits.w}});
    float sum = dot_four(low.at + 4, x[plane], dot_four(low.at, x[0], 0.0f));
    sum = dot_four(high.at + 4, x[3 * plane], dot_four(high.at, x[2 * plane], sum));
    return sum * w.scale;
  }
};

// --- NVFP4 ------------------------------------------------------------------------------------------

// A code's three low bits, as exponent and top mantissa bit of a float, are its magnitude times 2^-126.
__device__ __forceinline__ float from_e2m1(uint32_t code) {
  return __uint_as_float((code & 7) << 22 | (code & 8) << 28) * 0x1p126f;
}

template <>
struct Matrix<Float4E2M1> {
  static constexpr int kUnit = 32;
  const void* values;
  int columns;
  const uint8_t* group_scale;  // [rows, columns / 16] E4M3
  float scale;
  struct Loaded {
    uint4 bits;
    float scale[2];
  };
  __device__ __forceinline__ Loaded load(int row, int unit) const {
    const size_t group = (size_t(row) * columns + unit * kUnit) / kScaleGroup;
    const auto* scales = reinterpret_cast<const Float8E4M3*>(group_scale) + group;
    return {load_unit(static_cast<const uint8_t*>(values) + (size_t(row) * columns + unit * kUnit) / 2),
            {flashnext::load(scales) * scale, flashnext::load(scales + 1) * scale}};
  }
  __device__ __forceinline__ static float dot(const Loaded& w, const float4* x, int plane) {
    const uint32_t words[4] = {w.bits.x, w.bits.y, w.bits.z, w.bits.w};
    float sums[2] = {};
    UNROLL
    for (int i = 0; i < 8; i++) {  // four codes each
      float weight[4];
      UNROLL
      for (int j = 0; j < 4; j++) weight[j] = from_e2m1(words[i / 2] >> (16 * (i % 2) + 4 * j));
      sums[i / 4] = dot_four(weight, x[i * plane], sums[i / 4]);
    }
    return sums[0] * w.scale[0] + sums[1] * w.scale[1];
  }
};

// Puts value i of a vector where `dot` looks for it; `units` of them are in the vector.
template <class W>
__device__ __forceinline__ void place_value(float4* planes, int units, int i, float value) {
  constexpr int kUnit = Matrix<W>::kUnit;
  float4* four = planes + i % kUnit / 4 * units + i / kUnit;
  reinterpret_cast<float*>(four)[i % 4] = value;
}

}  // namespace flashnext
