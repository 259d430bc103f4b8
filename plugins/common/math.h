// Activations in float. Written so that no input overflows to NaN.
//
// The quotient is the fast one (two units in the last place): a rounded division is a subroutine, whose call costs
// registers around it. It gives 0 for a divisor beyond 2^126, which is the right limit here.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace flashnext {

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// PyTorch's softplus: the identity above 20, where the difference is below a float's last bit.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace flashnext
