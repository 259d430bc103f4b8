// GatedDeltaNet, token by token: convolution, commit of the accepted pending tokens, recurrence, gated norm.
//
// One launch for decoding and verification. It handles any number of steps (then with a second launch for the ring of
// conv inputs), one after the other.
#pragma once

#include "common/status.h"
#include "gated_delta_net/params.h"

namespace flashnext {

int64_t workspace_bytes(const GatedDeltaNetParams& p);
Status launch(const GatedDeltaNetParams& p);

}  // namespace flashnext
