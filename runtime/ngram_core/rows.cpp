// Rows of an n-gram table: token ids in, dequantized rows out, in one pass over the tokens.
//
// The rows are scattered over hundreds of gigabytes, so time is waiting for memory. The rows of some tokens are hashed
// and prefetched while those of the tokens before are copied. A long step is cut into blocks that threads take in turn,
// so a thread that is held up delays its block and not its share. Pages that are not in memory are asked for some blocks
// ahead (pages.h). A file that shrinks meanwhile gives zeros: whoever calls finds that out (../mapped_files).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "helpers.h"
#include "numbers.h"
#include "pages.h"
#include "row_cache.h"
#include "table.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
namespace {

// Tokens whose rows are asked for in one go, so that many walks through the page tables and many reads are under way.
constexpr int kTogether = 4;
constexpr int kLine = 64;
constexpr int64_t kBlock = 64;      // tokens that a thread takes at a time
constexpr int64_t kBlocksAhead = 8;  // whose pages are asked for
constexpr int64_t kSamples = 16;     // rows of a long step that are looked up to see whether pages are missing
constexpr auto kSlow = std::chrono::microseconds(25);  // a step of some rows that takes longer may have met a fault
// A result larger than the caches goes around them: else every line of it would be read before it is written.
constexpr int64_t kLargeResult = 1 << 20;

// --- one token -------------------------------------------------------------------------------------

struct Place {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t row;
  int32_t shard;
};

int64_t stored_bytes(const NgramTable& t) {
  if (t.form == kPlain) return t.columns * (t.output == kFloat32 ? 4 : 2);
  if (t.form == kWidened) return t.columns * 2;
  return t.form == kFp8 ? t.columns : t.columns / 2;
}

Place place_of(const NgramTable& t, int64_t row, int64_t row_bytes) {
  int32_t shard = t.shard_of[row >> t.shard_shift];
  while (row >= t.starts[shard + 1]) shard++;
  const int64_t within = row - t.starts[shard];
  const uint8_t* scales = t.row_scales ? t.row_scales[shard] + within * (t.columns / kGroup) : nullptr;
  return {t.shards[shard] + within * row_bytes, scales, row, shard};
}

// `value` modulo `size`, never negative: a multiplication by (2^63 - 1) / size in place of a division, which takes
// several times as long. The quotient is at most one off in either direction.
int64_t remainder(int64_t value, int64_t size, int64_t reciprocal) {
  const int64_t quotient = int64_t(__int128(value) * reciprocal >> 63);
  int64_t rest = value - quotient * size;
  rest += rest < 0 ? size : 0;
  return rest - (rest >= size ? size : 0);
}

// The rows of the token whose history is `recent`: recent[0] is the token, recent[-1] the one before it, …
void hash(const NgramTable& t, const int64_t* recent, int64_t* rows) {
  const int per_order = t.heads / (t.size - 1);
  uint64_t mixed = uint64_t(recent[0]) * uint64_t(t.multipliers[0]);
  bool across_eos = false;
  for (int shift = 1; shift < t.size; shift++) {
    across_eos |= recent[-shift] == t.eos;
    mixed ^= uint64_t(across_eos ? t.eos : recent[-shift]) * uint64_t(t.multipliers[shift]);
    for (int h = (shift - 1) * per_order; h < shift * per_order; h++) {
      rows[h] = remainder(int64_t(mixed), t.head_sizes[h], t.head_reciprocals[h]) + t.head_offsets[h];
    }
  }
}

// Into the second level of the caches: the first one tracks fewer reads at a time, and half as many rows a second came
// (measured on Zen 4). Inlined, since compilers take a function that only prefetches for one that does nothing.
[[gnu::always_inline]] inline void prefetch(const uint8_t* bytes, int64_t size) {
  for (uintptr_t line = uintptr_t(bytes) / kLine * kLine; line < uintptr_t(bytes) + size; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 1);
  }
}

void find(const NgramTable& t, const int64_t* recent, Place* places, int64_t row_bytes) {
  int64_t rows[kMaxHeads];
  hash(t, recent, rows);
  for (int h = 0; h < t.heads; h++) {
    places[h] = place_of(t, rows[h], row_bytes);
    if (t.cache.sets) {
      CacheSet(t.cache, rows[h]).prefetch();
      continue;
    }
    prefetch(places[h].codes, row_bytes);
    if (places[h].scales) prefetch(places[h].scales, t.columns / kGroup);
  }
}

// The row through the cache: from there, or from its file and then into the cache. Returns where it is now, in `buffer`.
Place through_cache(const NgramTable& t, const Place& from, int64_t row_bytes, uint8_t* buffer, int64_t& hits) {
  const CacheSet set(t.cache, from.row);
  uint8_t* const scales = from.scales ? buffer + row_bytes : nullptr;
  if (set.read(buffer)) {
    hits++;
  } else {
    std::memcpy(buffer, from.codes, size_t(row_bytes));
    if (scales) std::memcpy(scales, from.scales, size_t(t.columns / kGroup));
    set.write(buffer);
  }
  return {buffer, scales, from.row, from.shard};
}

// One row; false for a bad scale.
bool convert(const NgramTable& t, const Place& from, uint8_t* out, int64_t row_bytes, bool around_caches) {
  if (t.form == kPlain) {
    copy_row(from.codes, out, row_bytes, around_caches);
  } else if (t.form == kWidened) {
    widen(from.codes, out, t.columns);
  } else if (t.form == kFp8) {
    fp8_row(from.codes, out, t.columns, t, around_caches);
  } else if (t.output == kFloat32) {
    return nvfp4_row(t, from.codes, from.scales, reinterpret_cast<float*>(out), [](float v) { return v; });
  } else {
    return nvfp4_row(t, from.codes, from.scales, reinterpret_cast<uint16_t*>(out), to_bf16);
  }
  return true;
}

// --- a step ------------------------------------------------------------------------------------------

struct Step {
  const NgramTable& table;
  const int64_t* history;  // [batch, size - 1 + width]
  const int32_t* new_len;  // [batch]
  int64_t batch, width;
  uint8_t* out;  // [batch, width, heads, columns]

  int64_t tokens() const { return batch * width; }
  bool valid(int64_t token) const { return token % width < new_len[token / width]; }
  const int64_t* recent(int64_t token) const {
    return history + token / width * (table.size - 1 + width) + table.size - 1 + token % width;
  }
  int64_t token_bytes() const { return table.heads * table.columns * (table.output == kFloat32 ? 4 : 2); }
};

// A token's rows. Returns 0, or -1 - the shard of a bad scale.
int64_t copy(const Step& step, const Place* places, uint8_t* out, bool around_caches, int64_t& hits) {
  const NgramTable& t = step.table;
  const int64_t row_bytes = stored_bytes(t), out_bytes = step.token_bytes() / t.heads;
  alignas(kLine) uint8_t buffer[kMaxCachedBytes];
  for (int h = 0; h < t.heads; h++, out += out_bytes) {
    const Place from = t.cache.sets ? through_cache(t, places[h], row_bytes, buffer, hits) : places[h];
    if (!convert(t, from, out, row_bytes, around_caches)) return -1 - from.shard;
  }
  return 0;
}

// Tokens begin … end, row by row; those beyond a row's length give zeros. Returns as `copy` does.
int64_t gather(const Step& step, int64_t begin, int64_t end, int64_t& hits) {
  const NgramTable& t = step.table;
  const int64_t row_bytes = stored_bytes(t), token_bytes = step.token_bytes();
  const bool large = step.tokens() * token_bytes >= kLargeResult;
  const bool around_caches = large && uintptr_t(step.out) % kLine == 0 && token_bytes / t.heads % kLine == 0;
  Place under_way[2 * kTogether][kMaxHeads];
  const auto places = [&](int64_t token) { return under_way[(token - begin) % (2 * kTogether)]; };
  for (int64_t found = begin, copied = begin; copied < end;) {
    for (const int64_t limit = std::min(found + kTogether, end); found < limit; found++) {
      if (step.valid(found)) find(t, step.recent(found), places(found), row_bytes);
    }
    const int64_t ready = found < end ? found - kTogether : end;
    for (; copied < ready; copied++) {
      uint8_t* out = step.out + copied * token_bytes;
      if (!step.valid(copied)) {
        std::memset(out, 0, size_t(token_bytes));
      } else if (const int64_t bad = copy(step, places(copied), out, around_caches, hits)) {
        return bad;
      }
    }
  }
#if defined(__x86_64__)
  if (around_caches) _mm_sfence();  // what went around the caches is there for other processors too
#endif
  return 0;
}

// Asks for the missing pages of one row; whether there were any.
bool fetch_row(const NgramTable& t, int64_t row, int64_t row_bytes) {
  if (t.cache.sets && CacheSet(t.cache, row).contains()) return false;
  const Place place = place_of(t, row, row_bytes);
  const bool told = t.storage == kMapped;
  bool missing = fetch_missing(place.codes, row_bytes, told);
  if (place.scales) missing |= fetch_missing(place.scales, t.columns / kGroup, told);
  return missing;
}

// The same for tokens begin … end; how many rows were missing.
int64_t fetch_rows(const Step& step, int64_t begin, int64_t end) {
  const NgramTable& t = step.table;
  int64_t rows[kMaxHeads], missing = 0;
  for (int64_t token = begin; token < end; token++) {
    if (!step.valid(token)) continue;
    hash(t, step.recent(token), rows);
    for (int h = 0; h < t.heads; h++) missing += fetch_row(t, rows[h], stored_bytes(t));
  }
  return missing;
}

// Whether to look for missing pages: while the last calls met some, and where a few rows of a long step show it.
bool pages_may_be_missing(const Step& step) {
  const NgramTable& t = step.table;
  if (t.storage == kResident) return false;
  if (shared(t.counters->watch).load(std::memory_order_relaxed) > 0) return true;
  if (t.storage == kMappedUntold || step.tokens() < kBlock) return false;
  int64_t rows[kMaxHeads];
  for (int64_t i = 0; i < kSamples; i++) {
    const int64_t token = step.tokens() * i / kSamples;
    if (!step.valid(token)) continue;
    hash(t, step.recent(token), rows);
    if (fetch_row(t, rows[i % t.heads], stored_bytes(t))) return true;
  }
  return false;
}

// One call: blocks of tokens, taken by whichever thread comes first.
class Work {
 public:
  Work(const Step& step, bool fetch) : step_(step), fetch_(fetch) {}

  void run() {
    for (int64_t begin; (begin = gathered_.fetch_add(kBlock)) < step_.tokens() && !result_;) {
      const int64_t end = std::min(begin + kBlock, step_.tokens());
      int64_t hits = 0;
      if (fetch_) fetch_until(begin + (1 + kBlocksAhead) * kBlock);
      if (const int64_t bad = gather(step_, begin, end, hits)) result_ = bad;
      if (hits) shared(step_.table.counters->hot).fetch_add(hits, std::memory_order_relaxed);
    }
  }

  int64_t result() const { return result_; }
  int64_t missing() const { return missing_; }

 private:
  void fetch_until(int64_t limit) {
    limit = std::min(limit, step_.tokens());
    for (int64_t begin = fetched_; begin < limit;) {
      const int64_t end = std::min(begin + kBlock, step_.tokens());
      if (!fetched_.compare_exchange_weak(begin, end)) continue;  // `begin` is what another thread has come to
      missing_ += fetch_rows(step_, begin, end);
      begin = fetched_;
    }
  }

  const Step& step_;
  const bool fetch_;
  std::atomic<int64_t> gathered_{0}, fetched_{0}, missing_{0}, result_{0};
};

void count(const Step& step, int64_t missing, bool fetched) {
  NgramCounters& counters = *step.table.counters;
  int64_t rows = 0;
  for (int64_t i = 0; i < step.batch; i++) rows += std::clamp<int64_t>(step.new_len[i], 0, step.width);
  rows *= step.table.heads;
  shared(counters.rows).fetch_add(rows, std::memory_order_relaxed);
  const int64_t scales = step.table.row_scales ? step.table.columns / kGroup : 0;
  shared(counters.bytes).fetch_add(rows * (stored_bytes(step.table) + scales), std::memory_order_relaxed);
  if (missing) shared(counters.missing).fetch_add(std::min(missing, rows), std::memory_order_relaxed);
  if (missing) {
    shared(counters.watch).store(kWatchedCalls, std::memory_order_relaxed);
  } else if (fetched) {
    shared(counters.watch).fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace

EXPORT int64_t flashnext_ngram_rows(const NgramTable* table, const int64_t* history, const int32_t* new_len,
                                    int64_t batch, int64_t width, int32_t threads, void* out) {
  static thread_local int64_t known_faults = file_faults();
  const Step step{*table, history, new_len, batch, width, static_cast<uint8_t*>(out)};
  const bool fetch = pages_may_be_missing(step);
  const auto start = std::chrono::steady_clock::now();
  Work work(step, fetch);
  const int64_t useful = std::min<int64_t>(threads, (step.tokens() + kBlock - 1) / kBlock);
  if (useful > 1) {
    Helpers::instance().run([&work] { work.run(); }, size_t(useful - 1));
  } else {
    work.run();
  }
  int64_t missing = work.missing();
  const bool mapped = table->storage != kResident;
  if (mapped && (fetch || std::chrono::steady_clock::now() - start > kSlow)) {
    const int64_t faults = file_faults();
    // Of pages that nobody asked for, faults tell (those of this thread; a long step is looked at beforehand).
    if (!fetch) missing = faults - known_faults;
    known_faults = faults;
  }
  count(step, missing, fetch);
  return work.result();
}

// Row numbers alone, [batch, width, heads].
EXPORT void flashnext_ngram_ids(const NgramTable* table, const int64_t* history, int64_t batch, int64_t width,
                                int64_t* out) {
  const int64_t before = table->size - 1;
  for (int64_t row = 0; row < batch; row++) {
    for (int64_t i = 0; i < width; i++, out += table->heads) {
      hash(*table, history + row * (before + width) + before + i, out);
    }
  }
}
