// Fibers: the stacks that a block's threads run on, and the switch between them.
//
// On x86-64 the switch saves six registers and takes some nanoseconds; elsewhere ucontext does it. AddressSanitizer and
// ThreadSanitizer, where the program is linked with them, are told of every stack and switch.
#pragma once

#include <cstddef>

namespace simt {

struct Fiber {
  void* context = nullptr;     // saved stack pointer, or a ucontext_t
  char* stack = nullptr;       // lowest usable byte; the page below it faults
  size_t size = 0;             // 0: not a fiber of ours yet
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;        // ThreadSanitizer's
};

void adopt_current_thread(Fiber& fiber);               // so that fibers can switch back to it
void make_fiber(Fiber& fiber, void (*entry)());        // `entry` must never return
void free_fiber(Fiber& fiber);                         // not the one that is running
void switch_fiber(Fiber& from, Fiber& to);
void fiber_entered();                                  // first call in `entry`

// What ThreadSanitizer needs to know about order: a release before, an acquire after whatever orders memory.
void order_release(void* point);
void order_acquire(void* point);

void poison_memory(void* begin, size_t bytes);         // AddressSanitizer: any access is an error
void unpoison_memory(void* begin, size_t bytes);
bool address_sanitizer();

}  // namespace simt
