// What a launch reads and writes in global memory: bytes, distinct 32-byte sectors, and conflicts between blocks.
//
// Kernels reach global memory only through the functions of common/memory.h, and those report here. Counting sectors
// shows whether every byte of weights and state moves once. Watching for conflicts finds what no schedule of a single
// block can: two blocks of one launch that touch the same byte, one of them writing. Both cost time and memory, so they
// are off until asked for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

enum class Watch : int32_t { nothing, sectors, conflicts };

// Totals since `watch` was called last.
struct Counts {
  uint64_t launches, loaded_bytes, stored_bytes, loaded_sectors, stored_sectors, sectors;
};

extern Watch watching;

void watch(Watch what);
Counts counts();
void count_launch();
void count_access(const void* pointer, size_t bytes, bool store);

inline void note_load(const void* pointer, size_t bytes) {
  if (watching != Watch::nothing) count_access(pointer, bytes, false);
}
inline void note_store(const void* pointer, size_t bytes) {
  if (watching != Watch::nothing) count_access(pointer, bytes, true);
}
// Counted, but no conflict: the kernel orders it after the other blocks' accesses by itself.
inline void note_ordered_store(const void* pointer, size_t bytes) {
  if (watching == Watch::sectors) count_access(pointer, bytes, true);
}

}  // namespace simt
