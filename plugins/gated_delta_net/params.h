// GatedDeltaNet: what one launch takes.
//
// A field's comment is its shape and format ("T": the format that the field T names); the loader reads it. Slots of one
// batch are distinct, except that padding rows (new_len 0) may share any.
#pragma once

#include <cstdint>

struct GatedDeltaNetParams {
  const void* qkv;           // [batch, steps, channels] T
  const void* z;             // [batch, steps, value_heads*value_dim] T
  const void* a;             // [batch, steps, value_heads] T
  const void* b;             // [batch, steps, value_heads] T
  const void* conv_weight;   // [channels, 1, width] T
  const float* A_log;        // [value_heads] float32
  const float* dt_bias;      // [value_heads] float32
  const float* norm_weight;  // [value_dim] float32
  const int32_t* slots;      // [batch] int32
  const int32_t* past_len;   // [batch] int32
  const int32_t* accepted;   // [batch] int32
  const int32_t* new_len;    // [batch] int32
  void* conv_state;          // [rows, ring, channels] T
  void* recurrent_state;     // [rows, value_heads, key_dim, value_dim] U
  float* pending_state;      // [rows, window, pending_columns] float32
  void* y;                   // [batch, steps, value_heads*value_dim] T

  // Zeros before the first launch; every launch leaves zeros. Not needed by chunks.
  int32_t* tickets;  // [batch, key_heads] int32

  void* workspace;          // bytes
  void* stream;             // stream
  int32_t batch;            // size
  int32_t steps;            // size
  int32_t channels;         // size
  int32_t key_heads;        // size
  int32_t value_heads;      // size
  int32_t key_dim;          // size
  int32_t value_dim;        // size
  int32_t width;            // size
  int32_t rows;             // size
  int32_t ring;             // size
  int32_t window;           // size
  int32_t pending_columns;  // size
  int32_t T;                // format
  int32_t U;                // format
  int32_t silu_gate;        // attribute
  float eps;                // attribute
};
