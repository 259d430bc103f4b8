// CUDA's barriers, shuffles and votes on the host runtime.
//
// Each takes the caller's place in the source as a last, defaulted argument: lanes of one collective must come from the
// same place. Shuffles reject a read from a lane that is outside the mask, which on a GPU gives an undefined value.
#pragma once

#include "host/runtime.h"

#define SIMT_UNTRACED __attribute__((no_sanitize("thread")))  // reads other threads' stacks by design

inline void __syncthreads(SIMT_LOCATION) { simt::barrier(0, 0, true, "__syncthreads", location); }
inline int __syncthreads_count(int predicate, SIMT_LOCATION) {
  return simt::barrier_vote(predicate != 0, simt::Vote::count, "__syncthreads_count", location);
}
inline int __syncthreads_and(int predicate, SIMT_LOCATION) {
  return simt::barrier_vote(predicate != 0, simt::Vote::all, "__syncthreads_and", location);
}
inline int __syncthreads_or(int predicate, SIMT_LOCATION) {
  return simt::barrier_vote(predicate != 0, simt::Vote::any, "__syncthreads_or", location);
}
inline void __syncwarp(unsigned mask = ~0u, SIMT_LOCATION) {
  simt::gather_warp(mask, "__syncwarp", nullptr, nullptr, true, location);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned, SIMT_LOCATION) { simt::yield_thread("__nanosleep", location); }

namespace simt {

enum class Shuffle { index, up, down, exclusive_or };

template <class T>
struct ShuffleArgument {
  T in, out;
  int by, width;
  Shuffle kind;
  Location location;
};

SIMT_UNTRACED inline int shuffle_source(Shuffle kind, int lane, int by, int width) {
  const int segment = lane & ~(width - 1), last = segment + width - 1;
  switch (kind) {
    case Shuffle::up:
      return lane - by < segment ? lane : lane - by;
    case Shuffle::down:
      return lane + by > last ? lane : lane + by;
    case Shuffle::exclusive_or:
      return (lane ^ by) > last ? lane : lane ^ by;
    default:
      return segment | (by & (width - 1));
  }
}

template <class T>
SIMT_UNTRACED void run_shuffle(void** arguments, unsigned mask) {
  for (int l = 0; l < 32; l++) {
    if (!(mask >> l & 1)) continue;
    auto& mine = *static_cast<ShuffleArgument<T>*>(arguments[l]);
    const int source = shuffle_source(mine.kind, l, mine.by, mine.width);
    if (!(mask >> source & 1)) fail("a shuffle reads a lane that is outside the mask or has exited", mine.location);
    mine.out = static_cast<ShuffleArgument<T>*>(arguments[source])->in;
  }
}

template <class T>
T shuffle(unsigned mask, T value, int by, int width, Shuffle kind, const char* name, Location location) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
  ShuffleArgument<T> argument{value, value, by, width, kind, location};
  gather_warp(mask, name, &argument, &run_shuffle<T>, false, location);
  return argument.out;
}

struct BallotArgument {
  bool predicate;
  unsigned out;
};

SIMT_UNTRACED inline void run_ballot(void** arguments, unsigned mask) {
  unsigned bits = 0;
  for (int l = 0; l < 32; l++) {
    if (mask >> l & 1) bits |= unsigned(static_cast<BallotArgument*>(arguments[l])->predicate) << l;
  }
  for (int l = 0; l < 32; l++) {
    if (mask >> l & 1) static_cast<BallotArgument*>(arguments[l])->out = bits;
  }
}

struct ReduceArgument {
  unsigned value;
  bool largest;
};

SIMT_UNTRACED inline void run_reduce(void** arguments, unsigned mask) {
  const bool largest = static_cast<ReduceArgument*>(arguments[__builtin_ctz(mask)])->largest;
  unsigned best = largest ? 0 : ~0u;
  for (int l = 0; l < 32; l++) {
    if (!(mask >> l & 1)) continue;
    const unsigned value = static_cast<ReduceArgument*>(arguments[l])->value;
    best = (largest ? value > best : value < best) ? value : best;
  }
  for (int l = 0; l < 32; l++) {
    if (mask >> l & 1) static_cast<ReduceArgument*>(arguments[l])->value = best;
  }
}

inline unsigned reduce(unsigned mask, unsigned value, bool largest, const char* name, Location location) {
  ReduceArgument argument{value, largest};
  gather_warp(mask, name, &argument, &run_reduce, false, location);
  return argument.value;
}

}  // namespace simt

inline unsigned __reduce_max_sync(unsigned mask, unsigned value, SIMT_LOCATION) {
  return simt::reduce(mask, value, true, "__reduce_max_sync", location);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, SIMT_LOCATION) {
  return simt::reduce(mask, value, false, "__reduce_min_sync", location);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_LOCATION) {
  return simt::shuffle(mask, value, source, width, simt::Shuffle::index, "__shfl_sync", location);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LOCATION) {
  return simt::shuffle(mask, value, int(by), width, simt::Shuffle::up, "__shfl_up_sync", location);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_LOCATION) {
  return simt::shuffle(mask, value, int(by), width, simt::Shuffle::down, "__shfl_down_sync", location);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, int width = 32, SIMT_LOCATION) {
  return simt::shuffle(mask, value, by, width, simt::Shuffle::exclusive_or, "__shfl_xor_sync", location);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_LOCATION) {
  simt::BallotArgument argument{predicate != 0, 0};
  simt::gather_warp(mask, "__ballot_sync", &argument, &simt::run_ballot, false, location);
  return argument.out;
}
inline int __any_sync(unsigned mask, int predicate, SIMT_LOCATION) {
  return __ballot_sync(mask, predicate, location) != 0;
}
