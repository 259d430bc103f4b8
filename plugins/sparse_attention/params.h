// SparseAttention: what one launch takes. The forms of the op:
//
//     select         index_qk and the index states; without blocks
//     select_return  the same, with blocks_out
//     given          blocks and blocks_len instead
//
// The caches (K) are in the activations' format, or in E4M3: a key or value is a code times the layer's `k_scale` or
// `v_scale`, which are 1 where they are absent. That is what vLLM's `kv_cache_dtype="fp8"` means, so its scales fit.
//
// `score_bytes`: how many bytes of scores a long step keeps at a time; 0: 260 MiB.
#pragma once

#include <cstdint>

struct SparseAttentionParams {
  const void* q_gate;               // [batch, steps, heads*2*head_dim] T
  const void* k;                    // [batch, steps, kv_heads*head_dim] T
  const void* v;                    // [batch, steps, kv_heads*head_dim] T
  const void* index_qk;             // [batch, steps, index_heads*index_head_dim+index_head_dim] T
  const void* q_norm_weight;        // [head_dim] T
  const void* k_norm_weight;        // [head_dim] T
  const void* index_q_norm_weight;  // [index_head_dim] T
  const void* index_k_norm_weight;  // [index_head_dim] T
  const float* inv_freq;            // [frequencies] float32
  const int32_t* slots;             // [batch] int32
  const int32_t* past_len;          // [batch] int32
  const int32_t* new_len;           // [batch] int32
  void* key_state;                  // [rows, tokens, kv_heads, head_dim] K
  void* value_state;                // [rows, tokens, kv_heads, head_dim] K
  void* index_tail_state;           // [rows, ring, index_head_dim] T
  void* index_key_state;            // [rows, index_blocks, index_head_dim] T
  const int32_t* blocks;            // [batch, budget_blocks] int32
  const int32_t* blocks_len;        // [batch] int32
  const float* k_scale;             // [1] float32
  const float* v_scale;             // [1] float32
  void* y;                          // [batch, steps, heads*head_dim] T
  int32_t* blocks_out;              // [batch, budget_blocks] int32

  void* workspace;         // bytes
  void* stream;            // stream
  int32_t batch;           // size
  int32_t steps;           // size
  int32_t heads;           // size
  int32_t kv_heads;        // size
  int32_t head_dim;        // size
  int32_t index_heads;     // size
  int32_t index_head_dim;  // size
  int32_t frequencies;     // size
  int32_t rows;            // size
  int32_t tokens;          // size
  int32_t ring;            // size
  int32_t index_blocks;    // size
  int32_t budget_blocks;   // size
  int32_t T;               // format
  int32_t K;               // format
  int32_t block;           // attribute
  int64_t score_bytes;     // attribute
  float eps;               // attribute
  float rope_scale;        // attribute
};
