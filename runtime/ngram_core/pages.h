// Pages of a mapped table that are not in memory, asked for before their rows are read.
//
// A fault reads one page and waits for it: 70 us each on the disk where this was measured, one after the other. Asked for
// with MADV_WILLNEED, which does not wait, the same pages came every 12 us, from one thread. Asking costs a system call
// per row (0.7 us), many times what a row in memory costs, so it is done only while pages are missing.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "table.h"

namespace {

constexpr int64_t kWatchedCalls = 16;  // that find every page in memory before the table counts as being there again

const uintptr_t kPage = uintptr_t(sysconf(_SC_PAGESIZE));

inline std::atomic_ref<int64_t> shared(int64_t& counter) { return std::atomic_ref<int64_t>(counter); }

// Whether any page of these bytes has to be read; it has been asked for then.
inline bool fetch_missing(const uint8_t* bytes, int64_t size, bool told) {
  const uintptr_t begin = uintptr_t(bytes) / kPage * kPage, end = uintptr_t(bytes) + uintptr_t(size);
  bool missing = false;
  for (uintptr_t page = begin; page < end; page += kPage) {
    unsigned char state = 0;
    void* const at = reinterpret_cast<void*>(page);
    if (told && (mincore(at, kPage, &state) != 0 || (state & 1))) continue;
    madvise(at, kPage, MADV_WILLNEED);
    missing = true;
  }
  return missing;
}

// Faults of this thread that had to read a file, since the thread was born.
inline int64_t file_faults() {
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  return used.ru_majflt;
}

}  // namespace
