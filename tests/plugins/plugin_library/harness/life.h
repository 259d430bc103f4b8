// A plugin's life as TensorRT leads it: every step by itself, so that faults can be put between them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "case_file.h"
#include "tensorrt_side.h"

nvinfer1::IPluginCreatorInterface* const* getCreators_(int32_t& count);

namespace harness {

using namespace nvinfer1;
using Plugin = std::unique_ptr<IPluginV3>;

inline IPluginV3OneCore* core(IPluginV3& plugin) {
  return static_cast<IPluginV3OneCore*>(plugin.getCapabilityInterface(PluginCapabilityType::kCORE));
}
inline IPluginV3OneBuildV2* build(IPluginV3& plugin) {
  return static_cast<IPluginV3OneBuildV2*>(plugin.getCapabilityInterface(PluginCapabilityType::kBUILD));
}
inline IPluginV3OneRuntime* runtime(IPluginV3& plugin) {
  return static_cast<IPluginV3OneRuntime*>(plugin.getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

// --- what a case gives to callbacks -----------------------------------------------------------------

inline std::vector<PluginField> plugin_fields(const std::vector<Field>& fields) {
  std::vector<PluginField> out;
  for (const Field& f : fields) out.emplace_back(f.name.c_str(), f.data.data(), PluginFieldType(f.type), f.length);
  return out;
}

inline PluginTensorDesc desc_of(const Tensor& tensor) {
  PluginTensorDesc desc{};
  desc.dims = dims_of(tensor.dims);
  desc.type = DataType(tensor.type);
  desc.format = TensorFormat::kLINEAR;
  return desc;
}

struct Descs {
  std::vector<PluginTensorDesc> inputs, outputs;
};

inline Descs descs_of(const Step& step) {
  Descs out;
  for (const Tensor& tensor : step.inputs) out.inputs.push_back(desc_of(tensor));
  for (const Tensor& tensor : step.outputs) out.outputs.push_back(desc_of(tensor));
  return out;
}

struct Profile {
  std::vector<DynamicPluginTensorDesc> inputs, outputs;
};

// Dimensions that differ between the profile's ends are -1 in the description, as in a network.
inline Profile profile_of(const Case& given) {
  Profile out;
  const Step& step = given.steps[0];
  for (size_t i = 0; i < step.inputs.size(); i++) {
    DynamicPluginTensorDesc dynamic{};
    dynamic.desc = desc_of(step.inputs[i]);
    dynamic.min = dims_of(given.least[i]);
    dynamic.opt = dynamic.max = dims_of(given.most[i]);
    for (int32_t d = 0; d < dynamic.desc.dims.nbDims; d++) {
      if (dynamic.min.d[d] != dynamic.max.d[d]) dynamic.desc.dims.d[d] = -1;
    }
    out.inputs.push_back(dynamic);
  }
  for (const Tensor& tensor : step.outputs) {
    DynamicPluginTensorDesc dynamic{};
    dynamic.desc = desc_of(tensor);
    dynamic.min = dynamic.opt = dynamic.max = dynamic.desc.dims;
    out.outputs.push_back(dynamic);
  }
  return out;
}

// Expressions of a step's input shapes: dimensions that the profile varies are variables.
inline std::vector<DimsExprs> shapes_of(const Case& given, const Step& step, ExpressionBuilder& builder) {
  std::vector<DimsExprs> out;
  for (size_t i = 0; i < step.inputs.size(); i++) {
    DimsExprs shape{};
    shape.nbDims = int32_t(step.inputs[i].dims.size());
    for (int32_t d = 0; d < shape.nbDims; d++) {
      const int64_t value = step.inputs[i].dims[size_t(d)];
      const bool varies = given.least[i][size_t(d)] != given.most[i][size_t(d)];
      shape.d[d] = varies ? builder.variable(value) : builder.constant(value);
    }
    out.push_back(shape);
  }
  return out;
}

// --- memory -----------------------------------------------------------------------------------------

// Exactly as long as it must be, so that a sanitizer sees the first byte beyond; what nobody filled has all bits set.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(size_t(bytes)), data_(malloc(bytes_)) {
    memset(data_, 0xFF, bytes_);
  }
  explicit Memory(const Tensor& tensor) : Memory(tensor.bytes) {
    memcpy(data_, tensor.data.data(), tensor.data.size());
  }
  Memory(Memory&& other) noexcept : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  ~Memory() { free(data_); }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

struct Buffers {
  std::vector<Memory> owned;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
};

inline Buffers buffers_of(const Case& given, const Step& step) {
  Buffers out;
  for (const Tensor& tensor : step.inputs) {
    out.owned.emplace_back(tensor);
    out.inputs.push_back(out.owned.back().data());
  }
  for (size_t i = 0; i < step.outputs.size(); i++) {
    if (given.in_place && given.aliases[i] >= 0) {
      out.outputs.push_back(const_cast<void*>(out.inputs[size_t(given.aliases[i])]));
      continue;
    }
    out.owned.emplace_back(step.outputs[i].bytes);
    out.outputs.push_back(out.owned.back().data());
  }
  return out;
}

// --- creation ---------------------------------------------------------------------------------------

inline IPluginCreatorV3One* creator_of(const std::string& op) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const all = getCreators_(count);
  for (int32_t i = 0; i < count; i++) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(all[i]);
    if (op == creator->getPluginName()) return creator;
  }
  return nullptr;
}

inline Plugin create(const Case& given, TensorRTPhase phase, const std::vector<Field>& fields) {
  const std::vector<PluginField> list = plugin_fields(fields);
  const PluginFieldCollection collection{int32_t(list.size()), list.data()};
  return Plugin(creator_of(given.op)->createPlugin("layer", &collection, phase));
}

inline Plugin create(const Case& given) { return create(given, TensorRTPhase::kBUILD, given.fields); }

// A copy of what a plugin wants in the plan; empty if it fails.
inline std::vector<Field> serialized(IPluginV3& plugin) {
  std::vector<Field> out;
  const PluginFieldCollection* const fields = runtime(plugin)->getFieldsToSerialize();
  for (int32_t i = 0; fields && i < fields->nbFields; i++) {
    const PluginField& f = fields->fields[i];
    const size_t size = f.type == PluginFieldType::kCHAR ? 1 : 4;
    out.push_back({f.name, std::string(static_cast<const char*>(f.data), size * size_t(f.length)), int32_t(f.type),
                   f.length});
  }
  return out;
}

}  // namespace harness
