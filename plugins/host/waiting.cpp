// Everything that makes a thread wait: barriers, warp collectives, yields; and cp.async, which defers a copy to a wait.
// See runtime.h.
#include <cstring>

#include "host/state.h"

namespace simt {
namespace {

bool same_place(const Location& a, const Location& b) {
  return a.line() == b.line() && a.column() == b.column() && strcmp(a.file_name(), b.file_name()) == 0;
}

void check_arrival(Barrier& barrier, int count, Location location) {
  if (count % kWarp) fail("a barrier's thread count must be a multiple of 32", location);
  if (barrier.arrived == 0) {
    barrier.expected = count;
    barrier.location = location;
  } else if (barrier.expected != count) {
    fail("threads arrived at one barrier with different thread counts", location);
  } else if (count == 0 && !same_place(barrier.location, location)) {
    fail("threads of one block arrived at different __syncthreads (divergent barrier)", location);
  }
}

// The gathering of the current warp for these lanes: the one under way, or a new one.
Gathering& find_gathering(Warp& warp, unsigned mask, const char* name, bool placed, Location location) {
  Gathering* unused = nullptr;
  for (Gathering& gathering : warp.gatherings) {
    if (gathering.arrived && gathering.mask & mask) {
      if (gathering.mask != mask) fail("lanes of a warp collective disagree about the mask", location);
      if (strcmp(gathering.name, name) != 0) fail("lanes of one mask are at different warp collectives", location);
      if (placed && !same_place(gathering.location, location)) {
        fail("lanes of one mask are at different places of a warp collective", location);
      }
      return gathering;
    }
    if (!gathering.arrived && !unused) unused = &gathering;
  }
  if (!unused) fail("too many groups of one warp wait at the same time", location);
  unused->mask = mask;
  unused->name = name;
  unused->location = location;
  return *unused;
}

void run_copy(const Copy& copy) {
  char bytes[16] = {};
  // Real calls, so that the sanitizers see them; what is not read becomes zero.
  if (copy.source_bytes) memcpy(bytes, copy.from, copy.source_bytes);
  memcpy(copy.to, bytes, copy.bytes);
}

}  // namespace

void suspend(State state, const char* name, Location location) {
  current->state = state;
  current->waits_at = name;
  current->location = location;
  Warp& warp = block.warp[current->warp];
  warp.ready &= ~(1u << current->lane);
  if (!warp.ready) block.ready_warps &= ~(1u << current->warp);
}

void wake(int w, unsigned lanes) {
  for (unsigned left = lanes; left; left &= left - 1) {
    block.thread[w * kWarp + __builtin_ctz(left)]->state = State::ready;
  }
  block.warp[w].ready |= lanes;
  block.ready_warps |= 1u << w;
  block.idle_rounds = 0;
}

void yield_thread(const char* name, Location location) {
  suspend(State::yielded, name, location);
  block.warp[current->warp].yielded |= 1u << current->lane;
  run_next();
  current->state = State::ready;
}

void release_if_complete(Barrier& barrier) {
  const int needed = barrier.expected ? barrier.expected : block.alive;
  if (barrier.arrived == 0 || barrier.arrived < needed) return;
  barrier.arrived = 0;
  barrier.turn++;
  for (int i = 0; i < 3; i++) barrier.result[i] = barrier.votes[i];
  barrier.votes[0] = barrier.votes[2] = 0;
  barrier.votes[1] = 1;
  for (int w = 0; w < block.warps; w++) {
    if (barrier.waiting[w]) wake(w, barrier.waiting[w]);
    barrier.waiting[w] = 0;
  }
}

void barrier(int id, int count, bool wait, const char* name, Location location) {
  if (id < 0 || id >= kBarriers) fail("a block has barriers 0 to 15", location);
  Barrier& barrier = block.barrier[id];
  check_arrival(barrier, count, location);
  char* order = &barrier.order[barrier.turn & 1];
  order_release(order);
  barrier.arrived++;
  if (wait) {
    barrier.waiting[current->warp] |= 1u << current->lane;
    suspend(State::waiting, name, location);
  }
  release_if_complete(barrier);
  if (!wait) return;
  run_next();
  order_acquire(order);
}

int barrier_vote(bool predicate, Vote vote, const char* name, Location location) {
  Barrier& shared = block.barrier[0];
  shared.votes[0] += predicate;
  shared.votes[1] &= predicate;
  shared.votes[2] |= predicate;
  barrier(0, 0, true, name, location);
  return shared.result[int(vote)];
}

void gather_warp(unsigned mask, const char* name, void* argument, Collective run, bool orders_memory,
                 Location location) {
  const unsigned bit = 1u << current->lane;
  if (!(mask & bit)) fail("the calling lane is not in its own mask", location);
  Warp& warp = block.warp[current->warp];
  Gathering& gathering = find_gathering(warp, mask, name, run != nullptr, location);
  char* order = &gathering.order[gathering.turn & 1];
  if (orders_memory) order_release(order);
  gathering.arrived |= bit;
  gathering.arguments[current->lane] = argument;
  suspend(State::waiting, name, location);
  const unsigned needed = mask & warp.alive, arrived = gathering.arrived;
  if ((arrived & needed) == needed) {
    if (run) run(gathering.arguments, arrived);
    gathering.arrived = gathering.mask = 0;
    gathering.turn++;
    wake(current->warp, arrived);
  }
  run_next();
  if (orders_memory) order_acquire(order);
}

// --- cp.async ---------------------------------------------------------------------------------------

void run_copies(Thread& thread, size_t count) {
  for (size_t i = 0; i < count; i++) run_copy(thread.copies[i]);
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + ptrdiff_t(count));
}

void copy_async(void* to, const void* from, int bytes, int source_bytes, Location location) {
  if (reinterpret_cast<uintptr_t>(to) % unsigned(bytes) || reinterpret_cast<uintptr_t>(from) % unsigned(bytes)) {
    fail("cp.async: misaligned address", location);
  }
  const bool late = config.late_copies == 1 || (config.late_copies == 2 && random_bits() >> 63);
  const Copy copy{to, from, bytes, source_bytes};
  if (late) {
    current->copies.push_back(copy);
  } else {
    run_copy(copy);
  }
}

void copy_commit() { current->groups.push_back(current->copies.size()); }

void copy_wait(int groups_left) {
  std::vector<size_t>& groups = current->groups;
  if (int(groups.size()) <= groups_left) return;
  const size_t done = groups.size() - size_t(groups_left);
  const size_t copies = groups[done - 1];
  run_copies(*current, copies);
  groups.erase(groups.begin(), groups.begin() + ptrdiff_t(done));
  for (size_t& end : groups) end -= copies;
}

}  // namespace simt
