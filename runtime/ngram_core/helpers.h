// Threads that help a call and then wait for the next one. Starting threads anew costs more than a prompt's rows where a
// scheduler packs new threads onto the processor that makes them (measured: up to 1.5 ms until one ran, woken: 5 us).
//
// The caller always works himself, so a call ends even where there are no threads to be had.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

class Helpers {
 public:
  // Never destroyed: its threads may still wait when the process ends. A child of the process has none of them, and would
  // wait for ever for those that waited when it was born: it gets helpers of its own.
  static Helpers& instance() {
    static Helpers* helpers = new Helpers;
    static const int at_forks = pthread_atfork(nullptr, nullptr, [] { helpers = new Helpers; });
    (void)at_forks;
    return *helpers;
  }

  // Calls `work` on this thread and on up to `wanted` helpers; returns when all of them have returned.
  void run(const std::function<void()>& work, size_t wanted) {
    Call call{work, std::min(wanted, kMost), 0};
    std::unique_lock lock(mutex_);
    start(call.wanted);
    make_way(call.wanted);
    calls_.push_back(&call);
    lock.unlock();
    wake_.notify_all();
    work();
    lock.lock();
    calls_.erase(std::remove(calls_.begin(), calls_.end(), &call), calls_.end());
    left_.wait(lock, [&call] { return call.helping == 0; });
  }

 private:
  static constexpr size_t kMost = 63;

  struct Call {
    const std::function<void()>& work;
    size_t wanted;   // more helpers
    size_t helping;  // now
  };

  struct Helper {
    pthread_t thread{};
    int processor = -1;  // where it went to sleep
  };

  Helpers() { sched_getaffinity(0, sizeof(allowed_), &allowed_); }

  void start(size_t count) {
    try {
      while (helpers_.size() < count) {
        Helper& helper = helpers_.emplace_back();
        std::thread thread([this, &helper] { help(helper); });
        helper.thread = thread.native_handle();
        thread.detach();
      }
    } catch (const std::system_error&) {  // no more threads to be had
      helpers_.pop_back();
    }
  }

  // Sends helpers away that went to sleep on the processor of the caller: some schedulers let them wait there for
  // milliseconds, though another one is idle.
  void make_way(size_t count) {
    const int mine = sched_getcpu();
    for (size_t i = 0; i < std::min(count, helpers_.size()); i++) {
      if (helpers_[i].processor != mine) continue;
      cpu_set_t others = allowed_;
      CPU_CLR(mine, &others);
      if (CPU_COUNT(&others)) pthread_setaffinity_np(helpers_[i].thread, sizeof(others), &others);
    }
  }

  void help(Helper& self) {
    std::unique_lock lock(mutex_);
    for (;;) {
      self.processor = sched_getcpu();
      wake_.wait(lock, [this] { return !calls_.empty(); });
      Call& call = *calls_.front();
      call.helping++;
      if (--call.wanted == 0) calls_.pop_front();
      lock.unlock();
      call.work();
      lock.lock();
      if (--call.helping == 0) left_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<Call*> calls_;
  std::deque<Helper> helpers_;
  cpu_set_t allowed_{};
};

}  // namespace
