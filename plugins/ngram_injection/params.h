// NgramInjection: what one launch takes. `embedding` given, or r, y and s: the op's two forms.
#pragma once

#include <cstdint>

struct NgramInjectionParams {
  const void* embedding;          // [batch, steps, hidden] T
  const void* r;                  // [batch, steps, branches, hidden] R
  const void* y;                  // [batch, steps, hidden] T
  const float* s;                 // [batch, steps, branches] float32
  const void* key;                // [batch, steps, branches*hidden] T
  const void* value;              // [batch, steps, hidden] T
  const void* norm_key_weight;    // [branches*hidden] T
  const void* norm_query_weight;  // [branches*hidden] T
  const void* norm_conv_weight;   // [branches*hidden] T
  const void* conv_weight;        // [branches*hidden, 1, width] T
  const int32_t* slots;           // [batch] int32
  const int32_t* past_len;        // [batch] int32
  const int32_t* new_len;         // [batch] int32
  void* conv_state;               // [rows, ring, branches*hidden] T
  void* r_out;                    // [batch, steps, branches, hidden] R

  // FP8 state, as in GatedResidual: scales given, or one per token and branch that is made here for r_out; rounded
  // stochastically where there are positions.
  const float* r_scale;        // [branches] float32
  const float* r_out_scale;    // [branches] float32
  const float* r_token_scale;  // [batch, steps, branches] float32
  float* r_out_token_scale;    // [batch, steps, branches] float32
  const int32_t* positions;    // [batch, steps] int32

  void* workspace;    // bytes
  void* stream;       // stream
  int32_t batch;      // size
  int32_t steps;      // size
  int32_t branches;   // size
  int32_t hidden;     // size
  int32_t width;      // size
  int32_t rows;       // size
  int32_t ring;       // size
  int32_t T;          // format
  int32_t R;          // format
  int32_t dilation;   // attribute
  float eps;          // attribute
  int32_t site;       // attribute
  int64_t seed;       // attribute
};
