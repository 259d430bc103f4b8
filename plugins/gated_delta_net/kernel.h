// GatedDeltaNet: convolution, commit of the accepted pending tokens, delta rule, gated norm.
//
// Steps of up to `window` tokens (decoding, verification) go token by token in one launch, and stay pending. Longer ones
// commit at once: in BF16 by chunks of 64 tokens in three launches (chunks.h), in float token by token, with a second launch
// for the ring of conv inputs where it has no room for both old and new ones.
#pragma once

#include "common/status.h"
#include "gated_delta_net/params.h"

namespace flashnext {

int64_t workspace_bytes(const GatedDeltaNetParams& p);
Status launch(const GatedDeltaNetParams& p);

}  // namespace flashnext
