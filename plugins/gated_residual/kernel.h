// GatedResidual for decoding and verification: the pending write and the read of the next block's input.
//
// Two launches, each reading its half of the weights once. See kernel.cu.
#pragma once

#include "common/status.h"
#include "gated_residual/params.h"

namespace flashnext {

int64_t workspace_bytes(const GatedResidualParams& p);
Status launch(const GatedResidualParams& p);

}  // namespace flashnext
