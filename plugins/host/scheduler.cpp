// Runs grids: which thread goes next, what a block starts from, and how a failure ends it. See runtime.h.
//
// Schedules. Uniformly random switching never found a missing barrier after a read (a write-after-read race): a warp
// would have to be overtaken by a whole phase. Random priorities, where the highest ready warp runs until it waits and
// two priorities are swapped now and then, found 20 of 20.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "host/counting.h"
#include "host/state.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {

Config config;
Block block;
Thread launcher;
Thread* current = &launcher;

namespace {

constexpr unsigned char kPoison = 0xFF;  // NaN in every float format, -1 in every integer
constexpr unsigned char kCanary = 0xA5;
constexpr size_t kCanaryBytes = 256;
constexpr uint64_t kMaxIdleRounds = 200000;
constexpr unsigned kSwapOneIn = 512;  // scheduling decisions per change of priorities

alignas(1024) char dynamic_memory[kSharedLimit + kCanaryBytes];
size_t dynamic_bytes;
std::vector<std::pair<void*, size_t>> static_arrays;
std::map<const void*, size_t> static_bytes;  // by kernel
const void* running;                         // kernel

Body body;
void* closure;
std::string failure;
uint64_t random_state = 1;
int priority[kMaxWarps];
char grid_order[2];  // start and end of the block, for ThreadSanitizer

// Not memset: ThreadSanitizer would take it for an access by the running thread.
void fill(void* begin, unsigned char value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) static_cast<unsigned char*>(begin)[i] = value;
}

int nth_bit(unsigned bits, unsigned n) {
  while (n--) bits &= bits - 1;
  return __builtin_ctz(bits);
}

int lane_from(const Warp& warp) {
  const int k = warp.first_lane;
  const unsigned turned = k ? warp.ready >> k | warp.ready << (kWarp - k) : warp.ready;
  return (__builtin_ctz(turned) + k) % kWarp;
}

void let_yielded_go_on() {
  for (int w = 0; w < block.warps; w++) {
    Warp& warp = block.warp[w];
    if (!warp.yielded) continue;
    warp.ready |= warp.yielded;
    warp.yielded = 0;
    block.ready_warps |= 1u << w;
  }
}

Thread* by_priority() {
  if (random_below(kSwapOneIn) == 0) {
    std::swap(priority[random_below(block.warps)], priority[random_below(block.warps)]);
  }
  int i = 0;
  while (!(block.ready_warps >> priority[i] & 1)) i++;
  return block.thread[priority[i] * kWarp + lane_from(block.warp[priority[i]])];
}

// The thread to run next; the launcher when the block is done or stuck.
Thread* pick() {
  if (!block.ready_warps) {
    let_yielded_go_on();
    if (!block.ready_warps || ++block.idle_rounds > kMaxIdleRounds) return &launcher;
  }
  const unsigned warps = block.ready_warps;
  switch (config.schedule) {
    case Schedule::forward: {
      const int w = __builtin_ctz(warps);
      return block.thread[w * kWarp + __builtin_ctz(block.warp[w].ready)];
    }
    case Schedule::backward: {
      const int w = 31 - __builtin_clz(warps);
      return block.thread[w * kWarp + 31 - __builtin_clz(block.warp[w].ready)];
    }
    case Schedule::priority:
      return by_priority();
    default: {
      const int w = nth_bit(warps, random_below(__builtin_popcount(warps)));
      const unsigned lanes = block.warp[w].ready;
      return block.thread[w * kWarp + nth_bit(lanes, random_below(__builtin_popcount(lanes)))];
    }
  }
}

void switch_to(Thread* next) {
  Thread* from = current;
  if (next == from) return;
  current = next;
  threadIdx = next->index;
  switch_fiber(from->fiber, next->fiber);
}

void leave_block(Thread& thread) {
  suspend(State::exited, "exit", Location::current());
  Warp& warp = block.warp[thread.warp];
  warp.alive &= ~(1u << thread.lane);
  block.alive--;
  block.idle_rounds = 0;
  for (const Gathering& gathering : warp.gatherings) {
    const unsigned needed = gathering.mask & warp.alive;
    if (gathering.arrived && (gathering.arrived & needed) == needed) {
      fail("a lane that the mask of a waiting warp collective names has exited", gathering.location);
    }
  }
  if (block.alive) release_if_complete(block.barrier[0]);
}

void thread_entry() {
  fiber_entered();
  for (;;) {
    order_acquire(&grid_order[0]);
    body(closure);
    run_copies(*current, current->copies.size());
    current->groups.clear();
    order_release(&grid_order[1]);
    leave_block(*current);
    run_next();
  }
}

void describe(std::string& out, const char* what, Location location) {
  char line[512];
  snprintf(line, sizeof line, "%s at %s:%u in block (%u, %u, %u)", what, location.file_name(),
           unsigned(location.line()), blockIdx.x, blockIdx.y, blockIdx.z);
  out += line;
}

void describe_stuck() {
  std::map<std::string, int> places;
  for (int i = 0; i < block.threads; i++) {
    const Thread& thread = *block.thread[i];
    if (thread.state == State::exited) continue;
    std::string place;
    describe(place, thread.waits_at, thread.location);
    places[place]++;
  }
  failure = "the block is stuck (deadlock or livelock)";
  for (const auto& [place, count] : places) failure += "; " + std::to_string(count) + " threads wait in " + place;
  failure += "; " + std::to_string(block.threads - block.alive) + " have exited";
}

void reset_warps() {
  for (int w = 0; w < block.warps; w++) {
    Warp& warp = block.warp[w];
    warp.ready = warp.yielded = warp.alive = 0;
    warp.first_lane = int(random_below(kWarp));
    for (Gathering& gathering : warp.gatherings) gathering.arrived = gathering.mask = 0;
    priority[w] = w;
  }
  for (int i = block.warps; i > 1; i--) std::swap(priority[i - 1], priority[random_below(i)]);
  for (Barrier& barrier : block.barrier) {
    barrier.arrived = 0;
    barrier.votes[0] = barrier.votes[2] = 0;
    barrier.votes[1] = 1;
    std::fill_n(barrier.waiting, kMaxWarps, 0u);
  }
}

void reset_threads() {
  block.alive = block.threads;
  block.ready_warps = 0;
  block.idle_rounds = 0;
  for (int i = 0; i < block.threads; i++) {
    Thread& thread = *block.thread[i];
    const unsigned x = unsigned(i);
    thread.index = {x % blockDim.x, x / blockDim.x % blockDim.y, x / blockDim.x / blockDim.y};
    thread.warp = i / kWarp;
    thread.lane = i % kWarp;
    thread.state = State::ready;
    block.warp[thread.warp].alive |= 1u << thread.lane;
  }
  for (int w = 0; w < block.warps; w++) {
    block.warp[w].ready = block.warp[w].alive;
    block.ready_warps |= 1u << w;
  }
}

void poison_shared() {
  fill(dynamic_memory, kPoison, dynamic_bytes);
  for (const auto& [begin, bytes] : static_arrays) fill(begin, kPoison, bytes);
  if (!address_sanitizer()) fill(dynamic_memory + dynamic_bytes, kCanary, kCanaryBytes);
}

void check_canary() {
  if (address_sanitizer()) return;
  for (size_t i = 0; i < kCanaryBytes; i++) {
    if (static_cast<unsigned char>(dynamic_memory[dynamic_bytes + i]) != kCanary) {
      failure = "write past the end of dynamic shared memory";
    }
  }
}

void run_block(unsigned number) {
  blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
  poison_shared();
  reset_warps();
  reset_threads();
  order_release(&grid_order[0]);
  run_next();
  order_acquire(&grid_order[1]);
  if (failure.empty() && block.alive) describe_stuck();
  if (failure.empty()) check_canary();
}

std::vector<unsigned> block_order(size_t blocks) {
  std::vector<unsigned> order(blocks);
  for (size_t i = 0; i < blocks; i++) order[i] = unsigned(i);
  if (config.schedule == Schedule::backward) std::reverse(order.begin(), order.end());
  if (config.schedule == Schedule::forward || config.schedule == Schedule::backward) return order;
  for (size_t i = blocks; i > 1; i--) std::swap(order[i - 1], order[random_below(unsigned(i))]);
  return order;
}

// A failed launch leaves threads in the middle of their work: their stacks are thrown away.
void discard_threads() {
  for (Thread* thread : block.thread) {
    free_fiber(thread->fiber);
    delete thread;
  }
  block.thread.clear();
}

const char* check_launch(dim3 grid, dim3 threads, size_t shared_bytes) {
  const size_t count = size_t(threads.x) * threads.y * threads.z;
  if (count < 1 || count > kMaxWarps * kWarp) return "a block must have 1 to 1024 threads";
  if (!grid.x || !grid.y || !grid.z) return "a grid must have a block";
  if (grid.y > 65535 || grid.z > 65535) return "a grid's y and z must be at most 65535";
  if (shared_bytes > kSharedLimit) return "more dynamic shared memory than a block can have";
  return nullptr;
}

}  // namespace

uint64_t random_bits() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545F4914F6CDD1Dull;
}

unsigned random_below(unsigned limit) { return unsigned((random_bits() >> 32) * limit >> 32); }

void run_next() { switch_to(pick()); }

void fail(const char* message, Location location) {
  failure.clear();
  describe(failure, message, location);
  switch_to(&launcher);
  __builtin_unreachable();
}

void* dynamic_shared() { return dynamic_memory; }

void register_shared(void* begin, size_t bytes) {
  static_arrays.emplace_back(begin, bytes);
  static_bytes[running] += bytes;
  fill(begin, kPoison, bytes);
}

size_t static_shared_bytes(const void* kernel) { return static_bytes[kernel]; }

// Static arrays lie in the same loaded file as the dynamic memory, less than 1 GiB away.
uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const char*>(pointer) - dynamic_memory + (1 << 30));
}

void* shared_pointer(uint32_t address) { return dynamic_memory + (ptrdiff_t(address) - (1 << 30)); }

int lane() { return current->lane; }

uint64_t block_number() { return blockIdx.x + uint64_t(gridDim.x) * (blockIdx.y + uint64_t(gridDim.y) * blockIdx.z); }

const char* run_grid(const void* kernel, dim3 grid, dim3 threads, size_t shared_bytes, Body run, void* arguments) {
  if (const char* wrong = check_launch(grid, threads, shared_bytes)) return wrong;
  if (!launcher.fiber.size) adopt_current_thread(launcher.fiber);
  running = kernel;
  gridDim = grid;
  blockDim = threads;
  body = run;
  closure = arguments;
  failure.clear();
  dynamic_bytes = shared_bytes;
  block.threads = int(threads.x * threads.y * threads.z);
  block.warps = (block.threads + kWarp - 1) / kWarp;
  random_state = config.seed * 0x9E3779B97F4A7C15ull | 1;
  for (int i = 0; i < 4; i++) random_bits();
  while (int(block.thread.size()) < block.threads) {
    block.thread.push_back(new Thread);
    make_fiber(block.thread.back()->fiber, thread_entry);
  }
  unpoison_memory(dynamic_memory, sizeof dynamic_memory);
  poison_memory(dynamic_memory + shared_bytes, sizeof dynamic_memory - shared_bytes);
  count_launch();
  for (const unsigned number : block_order(size_t(grid.x) * grid.y * grid.z)) {
    run_block(number);
    if (!failure.empty()) {
      discard_threads();
      return failure.c_str();
    }
  }
  return nullptr;
}

}  // namespace simt
