// Kernels of the harness's own test: `fault` says which mistake is made (0: none).
#pragma once

#include <cstdint>

struct ProbeParams {
  const float* x;      // [rows, columns] float32
  const void* a;       // [16, 16] bfloat16
  const void* b;       // [8, 16] bfloat16
  float* sums;         // [rows] float32
  float* product;      // [16, 8] float32
  int32_t* bins;       // [4] int32
  void* workspace;     // bytes
  int32_t rows;        // size
  int32_t columns;     // size
  int32_t fault;       // attribute
};
