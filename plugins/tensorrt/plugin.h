// One plugin of TensorRT for all ops: what tells them apart is in the op table's rows.
//
// State. A state is an input and an output of the plugin; both are to have one address (a network input and output
// bound to the same memory, or aliased I/O). The kernel works in place, on the output's memory; where it is not the
// input's, the state is copied first, which is right, slow, and logged.
//
// Timing. While it builds an engine, TensorRT runs plugins on memory that nobody filled. A plugin of the build phase
// therefore holds the integers that kernels take for indices to their bounds, in a copy. What is valid stays as it is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorrt/attributes.h"
#include "tensorrt/call.h"
#include "tensorrt/device.h"
#include "tensorrt/op_table.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {

// What callbacks return where something is wrong; the reason is logged.
constexpr int32_t kError = 1;

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  Plugin(const OpRow& op, std::string name, Attributes attributes, bool is_building);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override;
  const char* getPluginNamespace() const noexcept override;

  // IPluginV3OneBuildV2
  int32_t getNbOutputs() const noexcept override { return int32_t(form().outputs.size()); }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t output_count, const nvinfer1::DataType* inputs,
                             int32_t input_count) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count, const nvinfer1::DimsExprs* shapes,
                          int32_t shape_count, nvinfer1::DimsExprs* outputs, int32_t output_count,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* ports, int32_t input_count,
                                 int32_t output_count) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t input_count,
                          const nvinfer1::DynamicPluginTensorDesc* outputs,
                          int32_t output_count) const noexcept override;
  int32_t getAliasedInput(int32_t output) noexcept override;
  const char* getTimingCacheID() noexcept override { return timing_id_.c_str(); }
  const char* getMetadataString() noexcept override { return form().name; }

  // IPluginV3OneRuntime
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t input_count,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t output_count) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  const FormRow& form() const { return attributes_.form(); }
  std::string where(const char* callback) const;
  Plugin* copy_of() const;
  void reserve(const Sizes& sizes);
  void run(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
           const void* const* inputs, void* const* outputs, void* workspace, void* stream);
  void bring_states(const nvinfer1::PluginTensorDesc* descs, std::span<const void*> inputs,
                    std::span<void* const> outputs, void* stream);
  void hold_to_bounds(const nvinfer1::PluginTensorDesc* descs, const Sizes& sizes, std::span<const void*> inputs,
                      void* stream);

  const OpRow& op_;
  const std::string name_;
  const Attributes attributes_;
  const bool is_building_;
  std::string timing_id_;
  DeviceMemory counters_;  // zeros, that every launch leaves as zeros
  DeviceMemory bounded_;   // of the build phase
  bool has_warned_ = false;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace flashnext::trt
