// Candidates: the `count` largest logits of each row, best first, ties to the lower index, and the sum over the whole row
// that makes probabilities of them: of exp((logit - largest) * inverse_temperature), NaN where a logit is NaN or the
// largest is infinite. Not an op of the graphs: the engine runs it on their logits, so that decoding brings back some
// hundred values and not the vocabulary.
#pragma once

#include <cstdint>

struct CandidatesParams {
  const void* logits;  // [rows, vocabulary] T
  float* values;       // [rows, count] float32
  int32_t* indices;    // [rows, count] int32
  float* sums;         // [rows] float32

  void* workspace;            // bytes
  void* stream;               // stream
  int32_t rows;               // size
  int32_t vocabulary;         // size
  int32_t count;              // size
  int32_t T;                  // format
  float inverse_temperature;  // attribute
};
