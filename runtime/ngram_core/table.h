// The table as library.py describes it: one plain struct, the same fields in the same order.
#pragma once

#include <cstdint>

enum Form : int32_t { kPlain = 0, kFp8 = 1, kNvfp4 = 2, kWidened = 3 };  // kWidened: BF16 rows, float output
enum Output : int32_t { kFloat32 = 0, kBFloat16 = 1 };
// Where the shards are: in memory for good; mapped; mapped, but the system does not say which pages are in memory.
enum Storage : int32_t { kResident = 0, kMapped = 1, kMappedUntold = 2 };

constexpr int kMaxHeads = 64;
constexpr int kGroup = 16;          // elements that share an NVFP4 scale
constexpr uint8_t kNanCode = 0x7F;  // E4M3 codes from here on are NaN or, as scales, negative

// What all calls together did; added to atomically, read by library.py.
struct NgramCounters {
  int64_t rows;     // gathered
  int64_t bytes;    // of them, as stored
  int64_t missing;  // rows that had to be read from a file
  int64_t hot;      // rows that the cache of rows had
  int64_t watch;    // calls that still look for missing pages before they gather
};

// Memory for rows that were read before; `sets` is a power of two, or 0 without a cache.
struct RowCache {
  int64_t* tags;   // [sets, 8] row number + 1; 0: nothing
  uint8_t* uses;   // [sets, 8]
  uint8_t* locks;  // [sets]
  uint8_t* rows;   // [sets, 8, row_bytes]
  int64_t sets;
  int64_t row_bytes;  // codes, then scales
};

struct NgramTable {
  const int64_t* multipliers;        // [size]
  const int64_t* head_sizes;         // [heads]
  const int64_t* head_reciprocals;   // [heads] (2^63 - 1) / size
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
  int32_t storage;         // Storage
  NgramCounters* counters;
  RowCache cache;
  float scale;
};
