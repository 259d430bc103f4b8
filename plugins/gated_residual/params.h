// GatedResidual: what one launch takes. Which pointers are null says which form of the op it is:
//
//     embed    embedding instead of r, y, s
//     start    start instead of r, y, s
//     pending  r, y, s
//     settled  r without y, s, r_out
//     last     r, y, s without inject_weight, s_out
//
// A field's comment is its shape and format ("T": the format that the field T names); the loader reads it.
#pragma once

#include <cstdint>

struct GatedResidualParams {
  const void* embedding;      // [tokens, hidden] T
  const void* start;          // [tokens, branches, hidden] T
  const void* r;              // [tokens, branches, hidden] R
  const void* y;              // [tokens, hidden] T
  const float* s;             // [tokens, branches] float32
  const void* norm_weight;    // [branches*hidden] T
  const void* down_weight;    // [rank, branches*hidden] W
  const void* up_weight;      // [branches*hidden, rank] W
  const void* inject_weight;  // [branches, branches*hidden] T
  void* r_out;                // [tokens, branches, hidden] R
  void* x;                    // [tokens, hidden] T
  float* s_out;               // [tokens, branches] float32

  // FP8 weights: one scale per row, that multiplies.
  const float* down_scale;  // [rank] float32
  const float* up_scale;    // [branches*hidden] float32

  // FP8 state: value = stored * scale. Static scales are given for what is read and for what is written; a dynamic
  // scale, one per token and branch, comes with r and is made for r_out (largest magnitude / 448). With `positions`
  // rounding is stochastic, keyed by them, by the store's number `site` and by `seed`.
  const float* r_scale;            // [branches] float32
  const float* r_out_scale;        // [branches] float32
  const float* r_token_scale;      // [tokens, branches] float32
  float* r_out_token_scale;        // [tokens, branches] float32
  const int32_t* positions;        // [tokens] int32

  void* workspace;  // bytes
  void* stream;     // stream
  int32_t tokens;   // size
  int32_t branches;  // size
  int32_t hidden;   // size
  int32_t rank;     // size
  int32_t T;        // format
  int32_t R;        // format
  int32_t W;        // format
  float eps;        // attribute
  int32_t site;     // attribute
  int64_t seed;     // attribute
};
