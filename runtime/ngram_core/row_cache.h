// Rows of a mapped table that were read before, in memory of their own: a page of the page cache holds a dozen rows of
// which rarely more than one is wanted, so the same memory keeps many more of the rows that texts repeat.
//
// A row can lie in one of eight places of its set. A lock per set is held while a row is copied, never while a file is
// read, which may take long.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "table.h"

namespace {

constexpr int kWays = 8;
constexpr int64_t kMaxCachedBytes = 4096;  // of a row
constexpr uint8_t kMostUses = 3;

class CacheSet {
 public:
  CacheSet(const RowCache& cache, int64_t row) : cache_(cache), tag_(row + 1) {
    // The upper bits of the product are the well mixed ones.
    set_ = int64_t((uint64_t(row) * 0x9E3779B97F4A7C15u) >> 32) & (cache.sets - 1);
  }

  void prefetch() const { __builtin_prefetch(tags(), 0, 0); }

  // Whether it has the row; may be outdated at once.
  bool contains() const {
    for (int way = 0; way < kWays; way++) {
      if (std::atomic_ref<int64_t>(tags()[way]).load(std::memory_order_relaxed) == tag_) return true;
    }
    return false;
  }

  // Copies the row to `out` if it is there.
  bool read(uint8_t* out) const {
    const Lock lock(cache_.locks[set_]);
    const int way = find(tag_);
    if (way == kWays) return false;
    uses()[way] = std::min<uint8_t>(uses()[way] + 1, kMostUses);
    std::memcpy(out, place(way), size_t(cache_.row_bytes));
    return true;
  }

  // Keeps a row in the place of the one that was asked for least.
  void write(const uint8_t* row) const {
    const Lock lock(cache_.locks[set_]);
    if (find(tag_) < kWays) return;  // another thread was faster
    int way = find(0);
    if (way == kWays) {
      way = int(std::min_element(uses(), uses() + kWays) - uses());
      for (int other = 0; other < kWays; other++) uses()[other] -= uses()[other] > 0;
    }
    uses()[way] = 0;
    std::memcpy(place(way), row, size_t(cache_.row_bytes));
    std::atomic_ref<int64_t>(tags()[way]).store(tag_, std::memory_order_relaxed);
  }

 private:
  class Lock {
   public:
    explicit Lock(uint8_t& byte) : held_(byte) {
      while (held_.exchange(1, std::memory_order_acquire)) {
      }
    }
    ~Lock() { held_.store(0, std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::atomic_ref<uint8_t> held_;
  };

  int find(int64_t tag) const { return int(std::find(tags(), tags() + kWays, tag) - tags()); }
  int64_t* tags() const { return cache_.tags + set_ * kWays; }
  uint8_t* uses() const { return cache_.uses + set_ * kWays; }
  uint8_t* place(int way) const { return cache_.rows + (set_ * kWays + way) * cache_.row_bytes; }

  const RowCache& cache_;
  const int64_t tag_;
  int64_t set_;
};

}  // namespace
