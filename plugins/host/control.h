// The C functions that the host execution has beside abi.h: schedules, and what launches read and wrote.
#pragma once

#include <cstdint>

#include "abi.h"

FLASHNEXT_API void simt_configure(int32_t schedule, uint64_t seed, int32_t late_copies);
FLASHNEXT_API void simt_watch(int32_t what);
// launches, bytes loaded, bytes stored, sectors loaded, sectors stored, sectors touched
FLASHNEXT_API void simt_counts(uint64_t out[6]);
