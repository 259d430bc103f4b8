// Fibers for the host execution; see fiber.h. Never compiled with a sanitizer: it moves the stack under its feet.
#include "host/fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

// Present only in a program that is linked with the sanitizer.
extern "C" {
#define WEAK __attribute__((weak))
WEAK void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
WEAK void __asan_poison_memory_region(const volatile void*, size_t);
WEAK void __asan_unpoison_memory_region(const volatile void*, size_t);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned);
WEAK void __tsan_destroy_fiber(void*);
WEAK void __tsan_switch_to_fiber(void*, unsigned);
WEAK void __tsan_acquire(void*);
WEAK void __tsan_release(void*);
}

#if defined(__x86_64__)
extern "C" void simt_switch(void** save, void* to);
asm(R"(.text
.p2align 4
.globl simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
#endif

namespace simt {
namespace {

constexpr size_t kPage = 4096;

// Instrumented frames are several times larger.
size_t stack_size() { return __asan_poison_memory_region || __tsan_create_fiber ? 256 << 10 : 64 << 10; }

void prepare_context(Fiber& fiber, void (*entry)()) {
#if defined(__x86_64__)
  // The switch pops six registers and returns into `entry`, where the ABI wants rsp % 16 == 8.
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.size) - 2;
  top[0] = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= 6; i++) top[-i] = nullptr;
  fiber.context = top - 6;
#else
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = fiber.stack;
  context->uc_stack.ss_size = fiber.size;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  fiber.context = context;
#endif
}

}  // namespace

void adopt_current_thread(Fiber& fiber) {
  pthread_attr_t attributes;
  void* stack = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &stack, &fiber.size);
  pthread_attr_destroy(&attributes);
  fiber.stack = static_cast<char*>(stack);
  if (__tsan_get_current_fiber) fiber.tsan = __tsan_get_current_fiber();
#if !defined(__x86_64__)
  if (!fiber.context) fiber.context = new ucontext_t;
#endif
}

void make_fiber(Fiber& fiber, void (*entry)()) {
  fiber.size = stack_size();
  void* memory = mmap(nullptr, fiber.size + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  mprotect(memory, kPage, PROT_NONE);
  fiber.stack = static_cast<char*>(memory) + kPage;
  if (__tsan_create_fiber) fiber.tsan = __tsan_create_fiber(0);
  prepare_context(fiber, entry);
}

void free_fiber(Fiber& fiber) {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(fiber.tsan);
  unpoison_memory(fiber.stack, fiber.size);
  munmap(fiber.stack - kPage, fiber.size + kPage);
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(fiber.context);
#endif
  fiber = Fiber{};
}

void switch_fiber(Fiber& from, Fiber& to) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.size);
  // Flag 1: the switch itself orders nothing, or no race could ever be seen.
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1);
#if defined(__x86_64__)
  simt_switch(&from.context, to.context);
#else
  swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
#endif
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
}

void fiber_entered() {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void order_release(void* point) {
  if (__tsan_release) __tsan_release(point);
}

void order_acquire(void* point) {
  if (__tsan_acquire) __tsan_acquire(point);
}

void poison_memory(void* begin, size_t bytes) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(begin, bytes);
}

void unpoison_memory(void* begin, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(begin, bytes);
}

bool address_sanitizer() { return __asan_poison_memory_region != nullptr; }

}  // namespace simt
