// One call of a kernel: its parameter struct for shapes, dtypes and attributes, without knowing the struct's fields.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tensorrt/attributes.h"
#include "tensorrt/op_table.h"
#include "tensorrt/sizes.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {

constexpr size_t kMaxParams = 512;

// Dtype (common/dtypes.h) of TensorRT's type, or -1. E4M3 codes are FP8; packed bytes come as INT8, because UINT8
// cannot enter a plugin.
int dtype_of(nvinfer1::DataType type);
nvinfer1::DataType type_of(int dtype);

// The dtypes of the op's type variables; -1 where none is bound yet.
using Dtypes = std::array<int, kMaxVariables>;
constexpr Dtypes kNoDtypes = {-1, -1};

// Whether a port may have this dtype, given what the ports before it have bound; binds the port's type variable.
bool accepts(const OpRow& op, const PortRow& port, int dtype, Dtypes& bound);
// Fault: there is no kernel for these dtypes.
Dtypes bind_dtypes(const OpRow& op, const FormRow& form, std::span<const nvinfer1::DataType> inputs);
int resolve(Type type, const Dtypes& bound);

class Call {
 public:
  Call(const OpRow& op, const Attributes& attributes, const Sizes& sizes, const Dtypes& dtypes);

  // Bytes of workspace for these sizes, which may be changed from call to call in batch and steps.
  int64_t workspace_bytes(const Sizes& sizes);
  // Fault: the kernel refuses attributes or sizes. Launches nothing.
  void check(const Sizes& sizes);
  // Fault: the launch failed. `inputs` and `outputs` by port; states are written where the outputs are.
  void launch(std::span<const void* const> inputs, std::span<void* const> outputs, void* workspace, void* counters,
              void* stream);

 private:
  void set_sizes(const Sizes& sizes);
  void set_pointer(int32_t offset, const void* pointer);
  void run();

  const OpRow& op_;
  const FormRow& form_;
  alignas(16) std::array<std::byte, kMaxParams> params_{};
};

// The largest workspace of all batches and steps between the two. Fault: the kernel refuses the sizes.
int64_t largest_workspace(const OpRow& op, const Attributes& attributes, const Sizes& least, const Sizes& most,
                          const Dtypes& dtypes);

}  // namespace flashnext::trt
