// What the parts of the host runtime share: the running block's threads, warps and barriers. Private to the runtime.
#pragma once

#include <vector>

#include "host/fiber.h"
#include "host/runtime.h"

namespace simt {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr int kCollectives = 8;  // disjoint groups of one warp that may wait at the same time
constexpr int kBarriers = 16;

enum class State : uint8_t { ready, waiting, yielded, exited };

struct Copy {
  void* to;
  const void* from;
  int bytes, source_bytes;
};

struct Thread {
  Fiber fiber;
  uint3 index{};
  int warp = 0, lane = 0;
  State state = State::exited;
  const char* waits_at = "";
  Location location;
  std::vector<Copy> copies;    // cp.async that have not run yet
  std::vector<size_t> groups;  // where each committed group ends in `copies`
};

struct Gathering {
  unsigned mask = 0, arrived = 0;
  const char* name = "";
  Location location;
  void* arguments[kWarp];
  char order[2];  // two points, used in turn, for ThreadSanitizer
  uint8_t turn = 0;
};

struct Warp {
  unsigned alive = 0, ready = 0, yielded = 0;
  int first_lane = 0;  // where the schedule starts looking
  Gathering gatherings[kCollectives];
};

struct Barrier {
  int arrived = 0, expected = 0;
  Location location;
  unsigned waiting[kMaxWarps]{};
  int votes[3]{}, result[3]{};
  char order[2];
  uint8_t turn = 0;
};

struct Block {
  int threads = 0, warps = 0, alive = 0;
  unsigned ready_warps = 0;
  uint64_t idle_rounds = 0;  // rounds in which only yielded threads were left
  Warp warp[kMaxWarps];
  Barrier barrier[kBarriers];
  std::vector<Thread*> thread;  // by linear index; kept between blocks
};
extern Block block;
extern Thread* current;  // the running thread, or the launcher
extern Thread launcher;

uint64_t random_bits();
unsigned random_below(unsigned limit);

void suspend(State state, const char* name, Location location);  // mark the current thread; then run_next()
void run_next();
void wake(int warp, unsigned lanes);
void release_if_complete(Barrier& barrier);
void run_copies(Thread& thread, size_t count);

}  // namespace simt
