// The attributes of a plugin: read from the fields that its creator gets, and written back to be serialized.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tensorrt/op_table.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {

struct Value {
  int32_t integer = 0;  // of a text: the number of the choice
  float number = 0.0f;
  std::string text;
};

// Beside the op's own attributes: `form`, and `aliased` (0 where it is missing), which says whether states are handed
// to TensorRT as aliased I/O. A plan also holds the op table's version and digest, which have to be this library's.
class Attributes {
 public:
  // Fault: a field is missing, unknown, given twice, of another type or without a possible value.
  Attributes(const OpRow& op, const nvinfer1::PluginFieldCollection* fields, bool from_plan);

  const FormRow& form() const { return *form_; }
  bool aliased() const { return aliased_ != 0; }
  const Value& value(size_t index) const { return values_[index]; }

  // Fields that point into this object.
  std::vector<nvinfer1::PluginField> fields() const;

 private:
  void take(const OpRow& op, const nvinfer1::PluginField& field, std::vector<std::string>& seen);
  void take_form(const OpRow& op, const nvinfer1::PluginField& field);
  void check_plan() const;

  const OpRow* op_;
  const FormRow* form_ = nullptr;
  int32_t aliased_ = 0, version_ = -1;
  std::string digest_;
  std::array<Value, kMaxAttributes> values_;
};

// What a creator lists: `form`, `aliased` and the op's attributes. Without data.
std::vector<nvinfer1::PluginField> field_names(const OpRow& op);

}  // namespace flashnext::trt
