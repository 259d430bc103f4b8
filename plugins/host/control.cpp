// C functions over the runtime's configuration and counters; see control.h.
#include "host/control.h"

#include "host/counting.h"
#include "host/runtime.h"

void simt_configure(int32_t schedule, uint64_t seed, int32_t late_copies) {
  simt::config = {static_cast<simt::Schedule>(schedule), seed, late_copies};
}

void simt_watch(int32_t what) { simt::watch(static_cast<simt::Watch>(what)); }

void simt_counts(uint64_t out[6]) {
  const simt::Counts c = simt::counts();
  const uint64_t values[6] = {c.launches,       c.loaded_bytes,   c.stored_bytes,
                              c.loaded_sectors, c.stored_sectors, c.sectors};
  for (int i = 0; i < 6; i++) out[i] = values[i];
}
