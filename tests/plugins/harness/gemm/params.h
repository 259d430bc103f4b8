// Products that use every helper of common/tensor_tile.h; shapes need no relation to the tiles', but rows are whole
// units of eight values.
#pragma once

#include <cstdint>

struct GemmParams {
  const void* a;           // [m, k] bfloat16
  const void* b;           // [n, k] bfloat16
  const void* a_columns;   // [k, m] bfloat16
  const void* b_columns;   // [k, n] bfloat16
  const int32_t* rows;     // [gathered] int32
  float* product;          // [m, n] float32
  float* transposed;       // [m, n] float32
  float* picked;           // [gathered, n] float32
  float* chained;          // [16, 16] float32
  int32_t* places;         // [4, 8] int32
  void* workspace;         // bytes
  int32_t m;               // size
  int32_t n;               // size
  int32_t k;               // size
  int32_t gathered;        // size
};
