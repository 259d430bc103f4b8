// SparseMoE: what one launch takes. W is the format of the expert weights and decides which scales there are:
//
//     float32, bfloat16    none
//     float8_e4m3fn        gate_up_scale, down_scale: a float per 128x128 block
//     uint8                NVFP4: *_group_scale per 16 elements, *_scale_2 per matrix; two elements in a byte
#pragma once

#include <cstdint>

struct SparseMoEParams {
  const void* x;               // [tokens, hidden] T
  const void* router_logits;   // [tokens, experts] T
  const void* gate_up_weight;  // [experts, 2, inner, hidden_stored] W
  const void* down_weight;     // [experts, hidden, inner_stored] W
  void* y;                     // [tokens, hidden] T

  const float* gate_up_scale;        // [experts, 2, (inner+127)//128, (hidden+127)//128] float32
  const float* down_scale;           // [experts, (hidden+127)//128, (inner+127)//128] float32
  const void* gate_up_group_scale;   // [experts, 2, inner, hidden//16] float8_e4m3fn
  const void* down_group_scale;      // [experts, hidden, inner//16] float8_e4m3fn
  const float* gate_up_scale_2;      // [experts, 2] float32
  const float* down_scale_2;         // [experts] float32

  void* workspace;        // bytes
  void* stream;           // stream
  int32_t tokens;         // size
  int32_t hidden;         // size
  int32_t experts;        // size
  int32_t inner;          // size
  int32_t hidden_stored;  // size
  int32_t inner_stored;   // size
  int32_t T;              // format
  int32_t W;              // format
  int32_t top_k;          // attribute
  int32_t normalize;      // attribute
};
