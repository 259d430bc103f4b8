// Rows of an n-gram table: token ids in, dequantized rows out, in one pass over the tokens.
//
// The rows are scattered over hundreds of gigabytes, so time is waiting for memory. The rows of a token are hashed and
// prefetched while those of an earlier token are copied; a long step is split over threads, and a table that has to be
// read from a disk over many, since each waits for its own page.
//
// A file that shrinks while it is mapped raises SIGBUS at the read. The handler below returns that as an error of this
// call; faults elsewhere go to whoever handled them before.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
namespace {

enum Form : int32_t { kPlain = 0, kFp8 = 1, kNvfp4 = 2, kWidened = 3 };  // kWidened: BF16 rows, float output
enum Output : int32_t { kFloat32 = 0, kBFloat16 = 1 };

constexpr int kAhead = 2;  // tokens whose rows are under way; more than the processor tracks gain nothing
constexpr int kMaxHeads = 64;
constexpr int kGroup = 16;  // elements that share an NVFP4 scale
constexpr int kLine = 64;
constexpr uint8_t kNanCode = 0x7F;  // E4M3 codes from here on are NaN or, as scales, negative
constexpr int64_t kTruncated = -1;  // the result of a call; a bad scale gives -2 - its shard

const float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

}  // namespace

// Filled by library.py, whose fields have the same order.
struct NgramTable {
  const int64_t* multipliers;        // [size]
  const int64_t* head_sizes;         // [heads]
  const int64_t* head_offsets;       // [heads]
  const uint8_t* const* shards;      // [shard_count]
  const uint8_t* const* row_scales;  // [shard_count], NVFP4 only
  const int64_t* starts;             // [shard_count + 1] first row of each shard
  const int32_t* shard_of;           // shard of row (i << shard_shift)
  const float* e4m3;                 // [256] values of the codes
  const void* values;                // [256] the same times the scale, in the output's format; FP8 only
  int64_t eos;
  int64_t columns;
  int32_t size;
  int32_t heads;
  int32_t shard_count;
  int32_t shard_shift;
  int32_t form;
  int32_t output;
  float scale;
};

namespace {

// --- faults of mapped files ------------------------------------------------------------------------

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

// --- numbers -----------------------------------------------------------------------------------------

inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t((bits >> 16 & 0x8000) | 0x7FC0);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// FP8 rows are looked up, code by code, in the 256 values that numpy made of the codes: the same bits in any case.
template <class T>
void look_up(const uint8_t* codes, T* out, int64_t count, const T* values) {
  for (int64_t i = 0; i < count; i++) out[i] = values[codes[i]];
}

#if defined(__x86_64__)
#define HAS_WIDE_LOOK_UP 1
// 32 codes at a time: two look-ups of 64 entries each for the codes without their sign, which is put back on top.
__attribute__((target("avx512bw,avx512f"))) void look_up_wide(const uint8_t* codes, uint16_t* out, int64_t count,
                                                              const uint16_t* values) {
  const __m512i low_a = _mm512_loadu_si512(values), low_b = _mm512_loadu_si512(values + 32);
  const __m512i high_a = _mm512_loadu_si512(values + 64), high_b = _mm512_loadu_si512(values + 96);
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    const __m512i wide = _mm512_cvtepu8_epi16(packed);
    const __m512i low = _mm512_permutex2var_epi16(low_a, wide, low_b);
    const __m512i high = _mm512_permutex2var_epi16(high_a, wide, high_b);
    const __m512i value = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(wide, _mm512_set1_epi16(64)), low, high);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(128)), 8);
    _mm512_storeu_si512(out + i, _mm512_or_si512(value, sign));
  }
  look_up(codes + i, out + i, count - i, values);
}
#else
#define HAS_WIDE_LOOK_UP 0
#endif

void widen(const uint8_t* bf16, uint8_t* out, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint16_t half;
    std::memcpy(&half, bf16 + 2 * i, 2);  // rows in a file need not be aligned
    const uint32_t bits = uint32_t(half) << 16;
    std::memcpy(out + 4 * i, &bits, 4);
  }
}

void fp8_row(const uint8_t* codes, void* out, int64_t count, const NgramTable& t) {
  if (t.output == kFloat32) {
    look_up(codes, static_cast<uint32_t*>(out), count, static_cast<const uint32_t*>(t.values));
    return;
  }
#if HAS_WIDE_LOOK_UP
  static const bool wide = __builtin_cpu_supports("avx512bw");
  if (wide) return look_up_wide(codes, static_cast<uint16_t*>(out), count, static_cast<const uint16_t*>(t.values));
#endif
  look_up(codes, static_cast<uint16_t*>(out), count, static_cast<const uint16_t*>(t.values));
}

// Scales that are no scales are found here, since only the rows that are read can be checked.
template <class T, class Convert>
bool nvfp4_row(const NgramTable& t, const uint8_t* packed, const uint8_t* scales, T* out, Convert convert) {
  for (int64_t group = 0; group < t.columns / kGroup; group++) {
    if (scales[group] >= kNanCode) return false;
    const float scale = t.e4m3[scales[group]] * t.scale;
    for (int i = 0; i < kGroup / 2; i++) {
      const uint8_t pair = packed[group * (kGroup / 2) + i];
      out[group * kGroup + 2 * i] = convert(kE2m1[pair & 15] * scale);
      out[group * kGroup + 2 * i + 1] = convert(kE2m1[pair >> 4] * scale);
    }
  }
  return true;
}

// --- one token -------------------------------------------------------------------------------------

struct Place {
  const uint8_t* codes;
  const uint8_t* scales;
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
  return {t.shards[shard] + within * row_bytes, scales, shard};
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
      const int64_t rest = int64_t(mixed) % t.head_sizes[h];
      rows[h] = (rest < 0 ? rest + t.head_sizes[h] : rest) + t.head_offsets[h];
    }
  }
}

void find(const NgramTable& t, const int64_t* recent, Place* places, int64_t row_bytes) {
  int64_t rows[kMaxHeads];
  hash(t, recent, rows);
  for (int h = 0; h < t.heads; h++) {
    places[h] = place_of(t, rows[h], row_bytes);
    const uintptr_t first = uintptr_t(places[h].codes) / kLine * kLine;
    for (uintptr_t line = first; line < uintptr_t(places[h].codes) + row_bytes; line += kLine) {
      __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 0);
    }
    if (places[h].scales) __builtin_prefetch(places[h].scales, 0, 0);
  }
}

// A result larger than the caches goes around them: else every line of it would be read before it is written.
constexpr int64_t kLargeResult = 1 << 20;

inline void copy_row(const uint8_t* from, uint8_t* out, int64_t bytes, bool around_caches) {
#if defined(__x86_64__)
  if (around_caches) {
    for (int64_t i = 0; i < bytes; i += 16) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), part);
    }
    return;
  }
#endif
  (void)around_caches;
  std::memcpy(out, from, size_t(bytes));
}

// Copies a token's rows; the shard of a bad scale, or -1.
int32_t copy(const NgramTable& t, const Place* places, uint8_t* out, int64_t row_bytes, bool around_caches) {
  const int64_t out_bytes = t.columns * (t.output == kFloat32 ? 4 : 2);
  for (int h = 0; h < t.heads; h++, out += out_bytes) {
    const Place& from = places[h];
    if (t.form == kPlain) {
      copy_row(from.codes, out, row_bytes, around_caches);
    } else if (t.form == kWidened) {
      widen(from.codes, out, t.columns);
    } else if (t.form == kFp8) {
      fp8_row(from.codes, out, t.columns, t);
    } else {
      const bool good =
          t.output == kFloat32
              ? nvfp4_row(t, from.codes, from.scales, reinterpret_cast<float*>(out), [](float v) { return v; })
              : nvfp4_row(t, from.codes, from.scales, reinterpret_cast<uint16_t*>(out), to_bf16);
      if (!good) return from.shard;
    }
  }
  return -1;
}

// --- a step ------------------------------------------------------------------------------------------

struct Step {
  const int64_t* history;  // [batch, size - 1 + width]
  const int32_t* new_len;  // [batch]
  int64_t batch, width;
  uint8_t* out;  // [batch, width, heads, columns]
};

// Tokens begin … end of the step, row by row; those beyond a row's length give zeros.
int64_t run(const NgramTable& t, const Step& step, int64_t begin, int64_t end) {
  const int64_t row_bytes = stored_bytes(t);
  const int64_t token_bytes = t.heads * t.columns * (t.output == kFloat32 ? 4 : 2);
  const int64_t stride = t.size - 1 + step.width;
  const bool large = step.batch * step.width * token_bytes >= kLargeResult;
  const bool around_caches = large && uintptr_t(step.out) % 16 == 0 && row_bytes % 16 == 0;
  Place ring[kAhead + 1][kMaxHeads];
  const auto valid = [&](int64_t token) { return token % step.width < step.new_len[token / step.width]; };
  for (int64_t token = begin; token < end + kAhead; token++) {
    if (token < end && valid(token)) {
      const int64_t* recent = step.history + token / step.width * stride + t.size - 1 + token % step.width;
      find(t, recent, ring[token % (kAhead + 1)], row_bytes);
    }
    const int64_t ready = token - kAhead;
    if (ready < begin) continue;
    uint8_t* out = step.out + ready * token_bytes;
    if (!valid(ready)) {
      std::memset(out, 0, size_t(token_bytes));
    } else if (const int32_t bad = copy(t, ring[ready % (kAhead + 1)], out, row_bytes, around_caches);
               bad >= 0) {
      return -2 - bad;
    }
  }
  return 0;
}

int64_t guarded_run(const NgramTable& t, const Step& step, int64_t begin, int64_t end) {
  sigjmp_buf here;
  if (sigsetjmp(here, 0)) {
    recovery = nullptr;
    return kTruncated;
  }
  recovery = &here;
  const int64_t result = run(t, step, begin, end);
#if defined(__x86_64__)
  _mm_sfence();  // what went around the caches is there for other processors too
#endif
  recovery = nullptr;
  return result;
}

}  // namespace

EXPORT int64_t flashnext_ngram_rows(const NgramTable* table, const int64_t* history, const int32_t* new_len,
                                    int64_t batch, int64_t width, int32_t threads, void* out) {
  install_handler();
  const Step step{history, new_len, batch, width, static_cast<uint8_t*>(out)};
  const int64_t tokens = batch * width, parts = std::clamp<int64_t>(threads, 1, std::max<int64_t>(tokens, 1));
  std::vector<int64_t> results(size_t(parts), 0);
  std::vector<std::thread> others;
  const auto part = [&](int64_t i) {
    results[size_t(i)] = guarded_run(*table, step, tokens * i / parts, tokens * (i + 1) / parts);
  };
  int64_t started = 1;
  try {
    for (; started < parts; started++) others.emplace_back(part, started);
  } catch (const std::system_error&) {  // no more threads to be had: this one does the rest
  }
  part(0);
  for (int64_t i = started; i < parts; i++) part(i);
  for (auto& other : others) other.join();
  for (const int64_t result : results) {
    if (result) return result;
  }
  return 0;
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
