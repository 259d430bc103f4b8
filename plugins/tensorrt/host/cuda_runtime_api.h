// What TensorRT's headers want of CUDA's, where there is no CUDA toolkit: the host execution's plugin library.
#pragma once

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
