// mma.sync and ldmatrix on the host runtime: the last lane of the warp to arrive computes for all.
//
// Fragment layouts are those of the PTX manual; tests compare them with CuTe's where its headers are installed.
#pragma once

#include <cstdint>

#include "host/collectives.h"

namespace simt {

struct MmaArgument {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  const float* c;
};

SIMT_UNTRACED inline float low_bf16(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
SIMT_UNTRACED inline float high_bf16(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xFFFF0000u); }

struct MmaTile {
  float a[16][16], b[16][8], c[16][8];
};

SIMT_UNTRACED inline void gather_fragments(MmaTile& tile, void** arguments) {
  for (int l = 0; l < 32; l++) {
    const auto& lane = *static_cast<MmaArgument*>(arguments[l]);
    const int group = l / 4, pair = 2 * (l % 4);
    for (int r = 0; r < 4; r++) {
      float* at = &tile.a[group + 8 * (r & 1)][pair + 8 * (r >> 1)];
      at[0] = low_bf16(lane.a[r]);
      at[1] = high_bf16(lane.a[r]);
    }
    for (int r = 0; r < 2; r++) {
      tile.b[pair + 8 * r][group] = low_bf16(lane.b[r]);
      tile.b[pair + 8 * r + 1][group] = high_bf16(lane.b[r]);
    }
    for (int i = 0; i < 4; i++) tile.c[group + 8 * (i >> 1)][pair + (i & 1)] = lane.c[i];
  }
}

SIMT_UNTRACED inline void run_mma(void** arguments, unsigned mask) {
  if (mask != ~0u) fail("mma.sync needs all 32 lanes", Location::current());
  MmaTile tile;
  gather_fragments(tile, arguments);
  for (int m = 0; m < 16; m++) {
    double sum[8];
    for (int n = 0; n < 8; n++) sum[n] = double(tile.c[m][n]);
    for (int k = 0; k < 16; k++) {
      for (int n = 0; n < 8; n++) sum[n] += double(tile.a[m][k]) * double(tile.b[k][n]);
    }
    for (int n = 0; n < 8; n++) tile.c[m][n] = float(sum[n]);
  }
  for (int l = 0; l < 32; l++) {
    auto& lane = *static_cast<MmaArgument*>(arguments[l]);
    for (int i = 0; i < 4; i++) lane.d[i] = tile.c[l / 4 + 8 * (i >> 1)][2 * (l % 4) + (i & 1)];
  }
}

inline void mma_bf16(float* d, const uint32_t* a, const uint32_t* b, const float* c, Location location) {
  MmaArgument argument{d, a, b, c};
  gather_warp(~0u, "mma.sync", &argument, &run_mma, false, location);
}

struct MatrixArgument {
  uint32_t address;
  uint32_t rows[32];
};

SIMT_UNTRACED inline void exchange_rows(void** arguments, unsigned mask) {
  if (mask != ~0u) fail("ldmatrix needs all 32 lanes", Location::current());
  for (int l = 0; l < 32; l++) {
    for (int m = 0; m < 32; m++) {
      static_cast<MatrixArgument*>(arguments[l])->rows[m] = static_cast<MatrixArgument*>(arguments[m])->address;
    }
  }
}

// Each lane reads what it receives by itself, so that the sanitizers see whose access it is.
inline void load_matrices(uint32_t (&r)[4], uint32_t row_address, bool transposed, Location location) {
  if (row_address % 16) fail("ldmatrix: a row is not aligned to 16 bytes", location);
  MatrixArgument argument{row_address, {}};
  gather_warp(~0u, "ldmatrix", &argument, &exchange_rows, false, location);
  const int l = lane();
  for (int j = 0; j < 4; j++) {
    uint32_t pair[2];
    for (int h = 0; h < 2; h++) {
      const int row = transposed ? l % 4 * 2 + h : l / 4;
      const int column = transposed ? l / 4 : l % 4 * 2 + h;
      pair[h] = static_cast<const uint16_t*>(shared_pointer(argument.rows[8 * j + row]))[column];
    }
    r[j] = pair[0] | pair[1] << 16;
  }
}

}  // namespace simt
