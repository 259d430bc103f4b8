// NgramInjection for decoding and prefill: pending write, gated n-gram value, dilated convolution, one store.
//
// Two launches; three where the ring of conv inputs is too short to be read and written at once.
#pragma once

#include "common/status.h"
#include "ngram_injection/params.h"

namespace flashnext {

int64_t workspace_bytes(const NgramInjectionParams& p);
Status launch(const NgramInjectionParams& p);

}  // namespace flashnext
