// Plain products as the kernels for long steps do them: four warps, 64 x 64 of C, two stages of 32 columns.
#include "abi.h"
#include "common/tensor_tile.h"
#include "params.h"

namespace flashnext {
namespace gemm {
namespace {

constexpr int kThreads = 128;
constexpr int kSide = 64;   // of the block's part of C; a warp has half of both sides
constexpr int kDepth = 32;  // columns of a stage

// A warp's 32 x 32 accumulators, to `to` [m, n], cut off at its edges.
__device__ __forceinline__ void store_product(const float (&sums)[2][4][4], int row, int column, float* to, int m,
                                              int n) {
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 4; j++) {
      for (int e = 0; e < 4; e++) {
        const int r = row + i * kMmaRows + accumulator_row(e), c = column + j * 8 + accumulator_column(e);
        if (r < m && c < n) store(&to[size_t(r) * n + c], sums[i][j][e]);
      }
    }
  }
}

// to = a * b^T, where row i of a is `row_at(i)`, null for zeros.
template <class RowAt>
__device__ __forceinline__ void multiply_rows(const GemmParams& p, RowAt row_at, float* to, int m) {
  SHARED_MEMORY(BFloat16, memory);
  const auto* b = static_cast<const BFloat16*>(p.b);
  const int first_row = blockIdx.y * kSide, first_column = blockIdx.x * kSide;
  const int warp_row = threadIdx.x / kWarpSize % 2 * 32, warp_column = threadIdx.x / kWarpSize / 2 * 32;
  const auto tile = [&](int stage, int operand) {
    return Tile<kDepth>{memory + (stage % 2 * 2 + operand) * kSide * kDepth};
  };
  const auto stage = [&](int step) {
    const int k = step * kDepth;
    stage_rows<kThreads>(tile(step, 0), kSide, p.k - k, [&](int i) {
      const BFloat16* from = first_row + i < m ? row_at(first_row + i) : nullptr;
      return from ? from + k : nullptr;
    });
    stage_rows<kThreads>(tile(step, 1), kSide, p.k - k, [&](int i) {
      return first_column + i < p.n ? b + size_t(first_column + i) * p.k + k : nullptr;
    });
    commit_copies();
  };
  const int steps = (p.k + kDepth - 1) / kDepth;
  float sums[2][4][4] = {};
  stage(0);
  for (int step = 0; step < steps; step++) {
    wait_for_copies<0>();
    __syncthreads();  // this stage is there, and everybody is done with the other one
    if (step + 1 < steps) stage(step + 1);
    warp_product<kDepth>(sums, tile(step, 0).from_row(warp_row), 0, tile(step, 1).from_row(warp_column), 0);
  }
  store_product(sums, first_row + warp_row, first_column + warp_column, to, m, p.n);
}

__global__ void multiply(GemmParams p) {
  const auto* a = static_cast<const BFloat16*>(p.a);
  multiply_rows(p, [&](int i) { return a + size_t(i) * p.k; }, p.product, p.m);
}

// The rows of a that `rows` names; a negative one stands for zeros.
__global__ void multiply_gathered(GemmParams p) {
  const auto* a = static_cast<const BFloat16*>(p.a);
  multiply_rows(
      p,
      [&](int i) {
        const int row = load(&p.rows[i]);
        return row < 0 ? nullptr : a + size_t(row) * p.k;
      },
      p.picked, p.gathered);
}

// The product of operands that lie with their depth first, 64 columns of either at a time.
__global__ void multiply_transposed(GemmParams p) {
  SHARED_MEMORY(BFloat16, memory);
  const Tile<kSide> a{memory}, b{memory + kDepth * kSide};
  const int first_row = blockIdx.y * kSide, first_column = blockIdx.x * kSide;
  const int warp_row = threadIdx.x / kWarpSize % 2 * 32, warp_column = threadIdx.x / kWarpSize / 2 * 32;
  float sums[2][4][4] = {};
  for (int k = 0; k < p.k; k += kDepth) {
    const auto rows_of = [&](const void* from, int columns, int first) {
      return [=](int i) {
        return k + i < p.k ? static_cast<const BFloat16*>(from) + size_t(k + i) * columns + first : nullptr;
      };
    };
    stage_rows<kThreads>(a, kDepth, p.m - first_row, rows_of(p.a_columns, p.m, first_row));
    stage_rows<kThreads>(b, kDepth, p.n - first_column, rows_of(p.b_columns, p.n, first_column));
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    for (int j = 0; j < kDepth; j += kMmaDepth) {
      for (int m = 0; m < 2; m++) {
        uint32_t left[4];
        load_a_transposed(left, a, j, warp_row + m * kMmaRows);
        for (int n = 0; n < 2; n++) {
          uint32_t right[2][2];
          load_b_transposed(right, b, j, warp_column + n * kPair);
          for (int h = 0; h < 2; h++) mma_bf16(sums[m][2 * n + h], left, right[h], sums[m][2 * n + h]);
        }
      }
    }
    __syncthreads();
  }
  store_product(sums, first_row + warp_row, first_column + warp_column, p.transposed, p.m, p.n);
}

// round(x * x^T) * x for x, the first 16 rows and columns of `a`: by one warp, the first product never in memory.
__global__ void multiply_chained(GemmParams p) {
  SHARED_MEMORY(BFloat16, memory);
  const Tile<16> x{memory};
  const auto* a = static_cast<const BFloat16*>(p.a);
  stage_rows<kWarpSize>(x, 16, p.k, [&](int i) { return i < p.m ? a + size_t(i) * p.k : nullptr; });
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();
  float first[1][2][4] = {}, second[2][4] = {};
  warp_product<16>(first, x, 0, x, 0);
  uint32_t left[4], right[2][2];
  accumulators_as_a(left, first[0][0], first[0][1]);
  load_b_transposed(right, x, 0, 0);
  for (int h = 0; h < 2; h++) {
    mma_bf16(second[h], left, right[h], second[h]);
    for (int e = 0; e < 4; e++) {
      store(&p.chained[accumulator_row(e) * 16 + h * 8 + accumulator_column(e)], second[h][e]);
    }
  }
}

// Which 16 of 128 bytes, the width of the banks, holds the same unit of eight neighbouring rows.
template <int Columns>
__device__ __forceinline__ void note_places(BFloat16* memory, int* to) {
  const Tile<Columns> tile{memory};
  const auto place = (tile.at(8 + threadIdx.x % 8, 8) - memory) * sizeof(BFloat16) / 16 % 8;
  if (threadIdx.x < 8) store(to + threadIdx.x, int(place));
}

__global__ void places(GemmParams p) {
  SHARED_MEMORY(BFloat16, memory);
  note_places<16>(memory, p.places);
  note_places<32>(memory, p.places + 8);
  note_places<64>(memory, p.places + 16);
  note_places<320>(memory, p.places + 24);
}

}  // namespace
}  // namespace gemm

int64_t workspace_bytes(const GemmParams&) { return 0; }

Status launch(const GemmParams& p) {
  using namespace gemm;
  const auto grid = [&](int rows) { return dim3((p.n + kSide - 1) / kSide, (rows + kSide - 1) / kSide); };
  const size_t shared = 4 * Tile<kDepth>::bytes(kSide);
  Status status = launch(multiply, grid(p.m), dim3(kThreads), shared, nullptr, p);
  if (status) status = launch(multiply_gathered, grid(p.gathered), dim3(kThreads), shared, nullptr, p);
  const size_t transposed = 2 * Tile<kSide>::bytes(kDepth);
  if (status) status = launch(multiply_transposed, grid(p.m), dim3(kThreads), transposed, nullptr, p);
  if (status) status = launch(multiply_chained, dim3(1), dim3(kWarpSize), Tile<16>::bytes(16), nullptr, p);
  if (status) status = launch(places, dim3(1), dim3(kWarpSize), Tile<320>::bytes(16), nullptr, p);
  return status;
}

REGISTER_OP(gemm, GemmParams);

}  // namespace flashnext
