// Gives the host execution's mma and ldmatrix the fragments as they come, and returns what every lane gets.
#include "abi.h"
#include "common/memory.h"
#include "common/ptx.h"
#include "params.h"

namespace flashnext {
namespace fragments {
namespace {

__device__ void put(void* to, int lane, const uint32_t (&r)[4]) {
  for (int i = 0; i < 4; i++) {
    store(static_cast<BFloat16*>(to) + lane * 8 + 2 * i, to_float(BFloat16{uint16_t(r[i])}));
    store(static_cast<BFloat16*>(to) + lane * 8 + 2 * i + 1, to_float(BFloat16{uint16_t(r[i] >> 16)}));
  }
}

__device__ uint32_t pair(const void* from, int place) {
  const auto* values = static_cast<const BFloat16*>(from) + place;
  return from_float<BFloat16>(load(values)).bits | uint32_t(from_float<BFloat16>(load(values + 1)).bits) << 16;
}

__global__ void run(FragmentsParams p) {
  SHARED_ARRAY(BFloat16, rows, [32 * 8]);
  const int lane = threadIdx.x;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; i++) a[i] = pair(p.a, lane * 8 + 2 * i);
  for (int i = 0; i < 2; i++) b[i] = pair(p.b, lane * 4 + 2 * i);
  float sum[4] = {};
  mma_bf16(sum, a, b, sum);
  for (int i = 0; i < 4; i++) store(&p.product[lane * 4 + i], sum[i]);

  const auto* row = static_cast<const BFloat16*>(p.rows) + lane * 8;
  for (int i = 0; i < 8; i++) rows[lane * 8 + i] = from_float<BFloat16>(load(row + i));
  __syncwarp();
  uint32_t r[4];
  load_matrices(r, shared_address(&rows[lane * 8]));
  put(p.loaded, lane, r);
  load_matrices_transposed(r, shared_address(&rows[lane * 8]));
  put(p.transposed, lane, r);
}

}  // namespace
}  // namespace fragments

int64_t workspace_bytes(const FragmentsParams&) { return 0; }

Status launch(const FragmentsParams& p) { return launch(fragments::run, dim3(1), dim3(32), 0, nullptr, p); }

REGISTER_OP(fragments, FragmentsParams);

}  // namespace flashnext
