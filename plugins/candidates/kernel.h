// Candidates: the largest logits of each row, sorted, and a sum over the row. Two launches.
#pragma once

#include "candidates/params.h"
#include "common/status.h"

namespace flashnext {

int64_t workspace_bytes(const CandidatesParams& p);
Status launch(const CandidatesParams& p);

}  // namespace flashnext
