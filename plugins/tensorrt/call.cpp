// Fills parameter structs by the offsets that the op table's rows hold, and launches through the kernels' C interface.
#include "tensorrt/call.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "abi.h"
#include "tensorrt/log.h"

namespace flashnext::trt {
namespace {

using nvinfer1::DataType;

constexpr DataType kTypes[] = {DataType::kFLOAT, DataType::kBF16, DataType::kHALF,
                               DataType::kFP8,   DataType::kINT32, DataType::kINT8};
// Of DataType's values.
constexpr const char* kNames[] = {"FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8",
                                  "FP8",   "BF16", "INT64", "INT4", "FP4",  "E8M0"};

// Up to this many steps a workspace is computed for each; beyond, no kernel changes its way of working, and sizes only
// grow with the steps.
constexpr int64_t kStepsOneByOne = 1024;

std::string name_of(DataType type) {
  const auto number = size_t(type);
  return number < std::size(kNames) ? kNames[number] : "a type of number " + std::to_string(int32_t(type));
}

// Where a kernel only looks whether a pointer is there.
alignas(16) char somewhere[16];

}  // namespace

int dtype_of(DataType type) {
  const auto* const found = std::find(std::begin(kTypes), std::end(kTypes), type);
  return found == std::end(kTypes) ? -1 : int(found - std::begin(kTypes));
}

DataType type_of(int dtype) { return kTypes[dtype]; }

bool accepts(const OpRow& op, const PortRow& port, int dtype, Dtypes& bound) {
  if (port.type.variable < 0) return dtype == port.type.fixed;
  Dtypes wanted = bound;
  int& variable = wanted[port.type.variable];
  if (dtype < 0 || (variable >= 0 && variable != dtype)) return false;
  variable = dtype;
  const bool has_kernel = std::any_of(op.combinations.begin(), op.combinations.end(), [&](const Combination& row) {
    return std::equal(wanted.begin(), wanted.end(), row.dtypes,
                      [](int want, int8_t have) { return want < 0 || want == have; });
  });
  if (has_kernel) bound = wanted;
  return has_kernel;
}

Dtypes bind_dtypes(const OpRow& op, const FormRow& form, std::span<const DataType> inputs) {
  if (inputs.size() != form.inputs.size()) {
    throw Fault("this form has " + std::to_string(form.inputs.size()) + " inputs, found " +
                std::to_string(inputs.size()));
  }
  Dtypes bound = kNoDtypes;
  for (size_t i = 0; i < inputs.size(); i++) {
    const PortRow& port = form.inputs[i];
    if (accepts(op, port, dtype_of(inputs[i]), bound)) continue;
    const int wanted = resolve(port.type, bound);
    throw Fault(std::string(port.name) + " is " + name_of(inputs[i]) +
                (wanted < 0 ? ", for which there is no kernel here" : " and must be " + name_of(type_of(wanted))));
  }
  return bound;
}

int resolve(Type type, const Dtypes& bound) { return type.variable < 0 ? type.fixed : bound[type.variable]; }

Call::Call(const OpRow& op, const Attributes& attributes, const Sizes& sizes, const Dtypes& dtypes)
    : op_(op), form_(attributes.form()) {
  if (op.params_bytes > int64_t(params_.size()) || flashnext_params_size(op.kernel) != op.params_bytes) {
    throw Fault("the kernels take other parameters than the plugins give: they were not built from one source");
  }
  for (size_t i = 0; i < op.attributes.size(); i++) {
    const AttributeRow& row = op.attributes[i];
    if (row.offset < 0) continue;
    const Value& value = attributes.value(i);
    const void* const from = row.kind == Kind::number ? static_cast<const void*>(&value.number) : &value.integer;
    memcpy(&params_[row.offset], from, sizeof(int32_t));
  }
  for (const FormatField& field : form_.formats) {
    const int32_t dtype = resolve(field.type, dtypes);
    memcpy(&params_[field.offset], &dtype, sizeof dtype);
  }
  for (const auto ports : {form_.inputs, form_.outputs}) {
    for (const PortRow& port : ports) set_pointer(port.offset, somewhere);
  }
  set_sizes(sizes);
}

void Call::set_sizes(const Sizes& sizes) {
  for (const SizeField& field : form_.sizes) {
    const int64_t value = evaluate(op_, field.value, sizes);
    if (value < 0 || value > INT32_MAX) throw Fault("a size is " + std::to_string(value) + ", more than kernels take");
    const auto given = int32_t(value);
    memcpy(&params_[field.offset], &given, sizeof given);
  }
}

void Call::set_pointer(int32_t offset, const void* pointer) { memcpy(&params_[offset], &pointer, sizeof pointer); }

int64_t Call::workspace_bytes(const Sizes& sizes) {
  set_sizes(sizes);
  return flashnext_workspace(op_.kernel, params_.data());
}

void Call::run() {
  if (flashnext_launch(op_.kernel, params_.data())) throw Fault(flashnext_message());
}

void Call::check(const Sizes& sizes) {
  // A batch of none is checked like any other, and launches nothing.
  Sizes none = sizes;
  none[kBatch] = 0;
  set_sizes(none);
  run();
  set_sizes(sizes);
}

void Call::launch(std::span<const void* const> inputs, std::span<void* const> outputs, void* workspace, void* counters,
                  void* stream) {
  for (size_t i = 0; i < inputs.size(); i++) set_pointer(form_.inputs[i].offset, inputs[i]);
  for (size_t i = 0; i < outputs.size(); i++) set_pointer(form_.outputs[i].offset, outputs[i]);
  set_pointer(op_.workspace_offset, workspace);
  set_pointer(op_.stream_offset, stream);
  if (op_.counters_offset >= 0) set_pointer(op_.counters_offset, counters);
  run();
}

int64_t largest_workspace(const OpRow& op, const Attributes& attributes, const Sizes& least, const Sizes& most,
                          const Dtypes& dtypes) {
  Sizes sizes = most;
  Call call(op, attributes, sizes, dtypes);
  call.check(sizes);
  int64_t bytes = 0;
  for (sizes[kBatch] = least[kBatch]; sizes[kBatch] <= most[kBatch]; sizes[kBatch]++) {
    const int64_t last = std::min(most[kSteps], kStepsOneByOne);
    for (sizes[kSteps] = least[kSteps]; sizes[kSteps] <= last; sizes[kSteps]++) {
      bytes = std::max(bytes, call.workspace_bytes(sizes));
    }
    sizes[kSteps] = most[kSteps];
    bytes = std::max(bytes, call.workspace_bytes(sizes));
  }
  return bytes;
}

}  // namespace flashnext::trt
