// A mapped file that shrinks raises SIGBUS at the read: the handler makes that the result of the work at hand. Faults
// elsewhere go to whoever handled them before.
#pragma once

#include <csetjmp>
#include <csignal>

namespace {

thread_local sigjmp_buf* recovery = nullptr;
struct sigaction earlier_action;

void on_bus_error(int, siginfo_t*, void*) {
  if (recovery) siglongjmp(*recovery, 1);
  sigaction(SIGBUS, &earlier_action, nullptr);  // not ours: the access is repeated and ends where it would have
}

void install_handler() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGBUS, &action, &earlier_action) == 0;
  }();
  (void)installed;
}

// Whether `work` ran to its end; false where a file had become too short.
template <class Work>
bool survives(const Work& work) {
  sigjmp_buf here;
  if (sigsetjmp(here, 0)) {
    recovery = nullptr;
    return false;
  }
  recovery = &here;
  work();
  recovery = nullptr;
  return true;
}

}  // namespace
