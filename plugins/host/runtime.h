// The host execution's runtime: runs a grid block by block, the block's threads as fibers on one CPU thread.
//
// A thread runs until it waits: at a barrier, or at a collective of its warp (a shuffle, a vote, an mma), where the last
// lane to arrive does the work for all. Which thread runs next is the schedule's choice. What a GPU leaves undefined is
// an error here: lanes that disagree about a collective, a barrier that not all threads reach, a deadlock. The error
// ends the launch, and `run_grid` returns its message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>

#include "host/keywords.h"

namespace simt {

using Location = std::source_location;
#define SIMT_LOCATION ::simt::Location location = ::simt::Location::current()

enum class Schedule : int32_t {
  forward,   // lowest ready thread first
  backward,  // highest ready thread first
  priority,  // warps get random priorities that change now and then: finds write-after-read races
  uniform,   // any ready thread, all equally likely
};

struct Config {
  Schedule schedule = Schedule::priority;
  uint64_t seed = 1;
  int32_t late_copies = 2;  // cp.async runs 0: at once, 1: at the wait, 2: either, by chance
};
extern Config config;

// --- launches ---------------------------------------------------------------------------------------
using Body = void (*)(void* closure);

// Runs every block of the grid. Returns nullptr, or what went wrong (valid until the next launch). `kernel` is the address
// of its function.
const char* run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, Body body, void* closure);

[[noreturn]] void fail(const char* message, Location location);

// --- shared memory ----------------------------------------------------------------------------------
constexpr size_t kSharedLimit = 99 << 10;     // of one block on sm_89 and sm_120, the least of the targets

void* dynamic_shared();
void register_shared(void* begin, size_t bytes);  // a static array, to be poisoned before every block
size_t static_shared_bytes(const void* kernel);   // of the arrays that a launch of it has come by
uint32_t shared_address(const void* pointer);     // the 32 bits that ldmatrix and cp.async take
void* shared_pointer(uint32_t address);

// --- threads ----------------------------------------------------------------------------------------
int lane();
uint64_t block_number();   // linear index of the running block

// `count` 0: all threads of the block that have not exited. `wait` false: arrive only.
void barrier(int id, int count, bool wait, const char* name, Location location);

enum class Vote { count, all, any };
int barrier_vote(bool predicate, Vote vote, const char* name, Location location);

// A collective of the lanes in `mask`. `run` gets the arguments of all lanes once all have arrived.
using Collective = void (*)(void** arguments, unsigned mask);
void gather_warp(unsigned mask, const char* name, void* argument, Collective run, bool orders_memory,
                 Location location);

void yield_thread(const char* name, Location location);

// --- cp.async ---------------------------------------------------------------------------------------
void copy_async(void* to, const void* from, int bytes, int source_bytes, Location location);
void copy_commit();
void copy_wait(int groups_left);

// Registers a static shared array at its declaration, before any thread can have written to it.
struct SharedArray {
  SharedArray(void* begin, size_t bytes) { register_shared(begin, bytes); }
};

}  // namespace simt
