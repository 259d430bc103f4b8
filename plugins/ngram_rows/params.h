// N-gram rows found by the device: hashes the tokens of a step and gathers their rows of the table, which may lie in
// pinned host memory. Not an op of the graphs: it makes what the body takes as n-gram rows. T is the format of the table:
//
//     float32, bfloat16    rows as they are
//     float8_e4m3fn        code * scale
//     uint8                NVFP4, two codes in a byte: code * (row_scale of its 16 columns * scale)
#pragma once

#include <cstdint>

struct NgramRowsParams {
  const void* table;            // [rows, columns_stored] T
  const void* row_scales;       // [rows, columns//16] float8_e4m3fn
  const int32_t* token_ids;     // [batch, steps] int32
  const int32_t* context;       // [batch, before] int32
  const int32_t* new_len;       // [batch] int32
  const int32_t* multipliers;   // [size, 2] int32
  const int32_t* head_sizes;    // [heads, 2] int32
  const int32_t* head_offsets;  // [heads, 2] int32
  void* out;                    // [batch, steps, heads*columns] O

  // Numbers of 64 bits are two of 32, the low one first. `context` holds the tokens before the step.
  void* workspace;         // bytes
  void* stream;            // stream
  int32_t rows;            // size
  int32_t columns;         // size
  int32_t columns_stored;  // size
  int32_t batch;           // size
  int32_t steps;           // size
  int32_t before;          // size
  int32_t size;            // size
  int32_t heads;           // size
  int32_t T;               // format
  int32_t O;               // format
  int32_t eos;             // attribute
  float scale;             // attribute
};
