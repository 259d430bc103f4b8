// N-gram rows: hash, gather, dequantize. One launch.
#pragma once

#include "common/status.h"
#include "ngram_rows/params.h"

namespace flashnext {

int64_t workspace_bytes(const NgramRowsParams& p);
Status launch(const NgramRowsParams& p);

}  // namespace flashnext
