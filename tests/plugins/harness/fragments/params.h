// Fragments of one product and of ldmatrix, lane by lane.
#pragma once

#include <cstdint>

struct FragmentsParams {
  const void* a;        // [32, 8] bfloat16
  const void* b;        // [32, 4] bfloat16
  float* product;       // [32, 4] float32
  const void* rows;     // [32, 8] bfloat16
  void* loaded;         // [32, 8] bfloat16
  void* transposed;     // [32, 8] bfloat16
  void* workspace;      // bytes
};
