// The callbacks of the plugin; each ends in `guarded`.
#include "tensorrt/plugin.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <utility>

#include "abi.h"
#include "tensorrt/log.h"
#include "tensorrt/op_table_data.h"

namespace flashnext::trt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

constexpr uintptr_t kAlignment = 16;
// Counters for so many sequences are there from the start, so that they need not grow.
constexpr int64_t kUsualBatch = 256;

std::atomic<int64_t> state_copies{0};

void check_given(const void* pointer, const char* what) {
  if (!pointer) throw Fault(std::string("TensorRT gave no ") + what);
}

void check_count(const char* what, size_t wanted, int32_t found) {
  if (int64_t(wanted) == found) return;
  throw Fault("this form has " + std::to_string(wanted) + " " + what + ", found " + std::to_string(found));
}

template <class Desc>
void check_ports(const FormRow& form, const Desc* inputs, int32_t input_count, const Desc* outputs,
                 int32_t output_count) {
  check_count("inputs", form.inputs.size(), input_count);
  check_count("outputs", form.outputs.size(), output_count);
  check_given(inputs, "inputs");
  check_given(outputs, "outputs");
}

void check_format(const PortRow& port, const PluginTensorDesc& desc) {
  if (desc.format != nvinfer1::TensorFormat::kLINEAR) throw Fault(std::string(port.name) + " must have linear format");
}

// Sizes that all inputs have at one end of a profile, or now.
template <class Desc, class Choose>
Sizes sizes_of(const OpRow& op, const Attributes& attributes, const Desc* inputs, Choose&& dims_of) {
  const size_t count = attributes.form().inputs.size();
  std::array<Dims, kMaxPorts> dims{};
  for (size_t i = 0; i < count; i++) dims[i] = dims_of(inputs[i]);
  return bind_sizes(op, attributes.form(), attributes, {dims.data(), count});
}

const PluginTensorDesc& desc_of(const PluginTensorDesc& desc) { return desc; }
const PluginTensorDesc& desc_of(const DynamicPluginTensorDesc& desc) { return desc.desc; }

// Fault: a format, or a dtype of inputs or outputs, is another than this form takes.
template <class Desc>
Dtypes dtypes_of(const OpRow& op, const FormRow& form, const Desc* inputs, const Desc* outputs) {
  std::array<DataType, kMaxPorts> types{};
  for (size_t i = 0; i < form.inputs.size(); i++) {
    check_format(form.inputs[i], desc_of(inputs[i]));
    types[i] = desc_of(inputs[i]).type;
  }
  Dtypes bound = bind_dtypes(op, form, {types.data(), form.inputs.size()});
  for (size_t i = 0; i < form.outputs.size(); i++) {
    check_format(form.outputs[i], desc_of(outputs[i]));
    if (!accepts(op, form.outputs[i], dtype_of(desc_of(outputs[i]).type), bound)) {
      throw Fault(std::string(form.outputs[i].name) + " has another dtype than the inputs ask for");
    }
  }
  return bound;
}

struct Profile {
  Sizes least, most;
};

// Fault: shapes do not fit, or another size than batch and steps varies.
Profile profile_of(const OpRow& op, const Attributes& attributes, const DynamicPluginTensorDesc* inputs) {
  const Profile found{sizes_of(op, attributes, inputs, [](const DynamicPluginTensorDesc& d) { return d.min; }),
                      sizes_of(op, attributes, inputs, [](const DynamicPluginTensorDesc& d) { return d.max; })};
  for (size_t i = 0; i < op.sizes.size(); i++) {
    const bool may_vary = i == kBatch || i == kSteps;
    if (may_vary ? found.least[i] <= found.most[i] : found.least[i] == found.most[i]) continue;
    throw Fault(std::string(op.sizes[i]) + " goes from " + std::to_string(found.least[i]) + " to " +
                std::to_string(found.most[i]) + " in this profile; only B and S may vary, upwards");
  }
  return found;
}

size_t volume(const Dims& dims) {
  size_t out = 1;
  for (int i = 0; i < dims.nbDims; i++) out *= size_t(dims.d[i]);
  return out;
}

size_t byte_count(const PluginTensorDesc& desc) {
  constexpr size_t kBytes[] = {4, 2, 2, 1, 4, 1};  // by Dtype
  return volume(desc.dims) * kBytes[dtype_of(desc.type)];
}

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Of the copies of all integers that are held to bounds.
size_t bounded_bytes(const FormRow& form, const PluginTensorDesc* inputs) {
  size_t bytes = 0;
  for (const BoundRow& row : form.bounds) bytes += aligned(byte_count(inputs[row.input]));
  return bytes;
}

void check_pointer(const PortRow& port, const void* pointer) {
  if (!pointer) throw Fault(std::string(port.name) + " has no memory");
  if (reinterpret_cast<uintptr_t>(pointer) % kAlignment) {
    throw Fault(std::string(port.name) + " does not start at a multiple of 16 bytes");
  }
}

std::string timing_id(const OpRow& op, const Attributes& attributes) {
  std::string id = std::string(op.name) + " " + attributes.form().name;
  for (size_t i = 0; i < op.attributes.size(); i++) {
    const Value& value = attributes.value(i);
    id += " " + std::to_string(value.integer) + " " + std::to_string(value.number);
  }
  return id;
}

}  // namespace

Plugin::Plugin(const OpRow& op, std::string name, Attributes attributes, bool is_building)
    : op_(op), name_(std::move(name)), attributes_(std::move(attributes)), is_building_(is_building),
      timing_id_(timing_id(op_, attributes_)) {}

std::string Plugin::where(const char* callback) const {
  return std::string(op_.name) + " '" + name_ + "' (form " + form().name + "), " + callback;
}

// --- core -------------------------------------------------------------------------------------------

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

const char* Plugin::getPluginVersion() const noexcept { return FLASHNEXT_PLUGIN_VERSION; }

const char* Plugin::getPluginNamespace() const noexcept { return FLASHNEXT_PLUGIN_NAMESPACE; }

Plugin* Plugin::copy_of() const { return new Plugin(op_, name_, attributes_, is_building_); }

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return where("clone"); }, [&] { return copy_of(); });
}

// --- build ------------------------------------------------------------------------------------------

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t output_count, const DataType* inputs,
                                   int32_t input_count) const noexcept {
  return guarded(kError, [&] { return where("output dtypes"); }, [&] {
    check_ports(form(), inputs, input_count, static_cast<const DataType*>(outputs), output_count);
    const Dtypes bound = bind_dtypes(op_, form(), {inputs, size_t(input_count)});
    for (int32_t i = 0; i < output_count; i++) outputs[i] = type_of(resolve(form().outputs[i].type, bound));
    return 0;
  });
}

int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t input_count, const nvinfer1::DimsExprs*,
                                int32_t shape_count, nvinfer1::DimsExprs* outputs, int32_t output_count,
                                nvinfer1::IExprBuilder& builder) noexcept {
  return guarded(kError, [&] { return where("output shapes"); }, [&] {
    check_ports(form(), inputs, input_count, static_cast<const nvinfer1::DimsExprs*>(outputs), output_count);
    check_count("shape inputs", 0, shape_count);
    output_shapes(op_, form(), attributes_, {inputs, size_t(input_count)}, {outputs, size_t(output_count)}, builder);
    return 0;
  });
}

bool Plugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* ports, int32_t input_count,
                                       int32_t output_count) noexcept {
  return guarded(false, [&] { return where("formats"); }, [&] {
    check_ports(form(), ports, input_count, ports, output_count);
    if (position < 0 || position >= input_count + output_count) throw Fault("there is no such port");
    Dtypes bound = kNoDtypes;
    for (int32_t i = 0; i <= position; i++) {
      const PortRow& port = i < input_count ? form().inputs[i] : form().outputs[i - input_count];
      const PluginTensorDesc& desc = ports[i].desc;
      if (desc.format != nvinfer1::TensorFormat::kLINEAR || !accepts(op_, port, dtype_of(desc.type), bound)) {
        return false;
      }
    }
    return true;
  });
}

int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                const DynamicPluginTensorDesc* outputs, int32_t output_count) noexcept {
  return guarded(kError, [&] { return where("configuration"); }, [&] {
    check_ports(form(), inputs, input_count, outputs, output_count);
    const Dtypes dtypes = dtypes_of(op_, form(), inputs, outputs);
    const Profile profile = profile_of(op_, attributes_, inputs);
    Call(op_, attributes_, profile.most, dtypes).check(profile.most);
    return 0;
  });
}

size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t input_count,
                                const DynamicPluginTensorDesc* outputs, int32_t output_count) const noexcept {
  // There is no error code here: an impossible size keeps TensorRT from building an engine that would write too far.
  return guarded(std::numeric_limits<size_t>::max(), [&] { return where("workspace"); }, [&] {
    check_ports(form(), inputs, input_count, outputs, output_count);
    const Profile profile = profile_of(op_, attributes_, inputs);
    const Dtypes dtypes = dtypes_of(op_, form(), inputs, outputs);
    return size_t(largest_workspace(op_, attributes_, profile.least, profile.most, dtypes));
  });
}

int32_t Plugin::getAliasedInput(int32_t output) noexcept {
  if (!attributes_.aliased() || output < 0 || output >= getNbOutputs()) return -1;
  return form().outputs[output].alias;
}

// --- runtime ----------------------------------------------------------------------------------------

int32_t Plugin::onShapeChange(const PluginTensorDesc* inputs, int32_t input_count, const PluginTensorDesc* outputs,
                              int32_t output_count) noexcept {
  return guarded(kError, [&] { return where("shape change"); }, [&] {
    check_ports(form(), inputs, input_count, outputs, output_count);
    const auto dims_of = [](const PluginTensorDesc& desc) { return desc.dims; };
    const Sizes sizes = sizes_of(op_, attributes_, inputs, dims_of);
    for (int32_t i = 0; i < output_count; i++) check_shape(op_, form().outputs[i], sizes, outputs[i].dims);
    Call(op_, attributes_, sizes, dtypes_of(op_, form(), inputs, outputs)).check(sizes);
    reserve(sizes);
    if (is_building_) bounded_.reserve(bounded_bytes(form(), inputs));
    return 0;
  });
}

void Plugin::reserve(const Sizes& sizes) {
  if (op_.counters_offset < 0) return;
  Sizes usual = sizes;
  usual[kBatch] = std::max(sizes[kBatch], kUsualBatch);
  counters_.reserve(size_t(evaluate(op_, op_.counters, usual)) * sizeof(int32_t));
}

int32_t Plugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                        const void* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) noexcept {
  return guarded(kError, [&] { return where("run"); }, [&] {
    run(input_descs, output_descs, inputs, outputs, workspace, stream);
    return 0;
  });
}

void Plugin::run(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs, const void* const* inputs,
                 void* const* outputs, void* workspace, void* stream) {
  check_given(input_descs, "descriptions of inputs");
  check_given(output_descs, "descriptions of outputs");
  check_given(inputs, "inputs");
  check_given(outputs, "outputs");
  const auto dims_of = [](const PluginTensorDesc& desc) { return desc.dims; };
  const Sizes sizes = sizes_of(op_, attributes_, input_descs, dims_of);
  Call call(op_, attributes_, sizes, dtypes_of(op_, form(), input_descs, output_descs));
  std::array<const void*, kMaxPorts> given{};
  const std::span<const void*> in(given.data(), form().inputs.size());
  const std::span<void* const> out(outputs, form().outputs.size());
  memcpy(given.data(), inputs, in.size_bytes());
  const bool is_empty = sizes[kBatch] == 0 || sizes[kSteps] == 0;
  for (size_t i = 0; i < in.size() && !is_empty; i++) check_pointer(form().inputs[i], in[i]);
  for (size_t i = 0; i < out.size() && !is_empty; i++) check_pointer(form().outputs[i], out[i]);
  bring_states(input_descs, in, out, stream);
  if (is_empty) return;
  if (!workspace && call.workspace_bytes(sizes) > 0) throw Fault("TensorRT gave no workspace");
  if (is_building_) hold_to_bounds(input_descs, sizes, in, stream);
  reserve(sizes);
  call.launch(in, out, workspace, counters_.data(), stream);
}

void Plugin::bring_states(const PluginTensorDesc* descs, std::span<const void*> inputs, std::span<void* const> outputs,
                          void* stream) {
  for (size_t i = 0; i < outputs.size(); i++) {
    const PortRow& port = form().outputs[i];
    if (port.alias < 0) continue;
    const void* const from = std::exchange(inputs[port.alias], outputs[i]);
    if (from == outputs[i]) continue;
    check_given(from, "state");
    check_given(outputs[i], "state");
    copy(outputs[i], from, byte_count(descs[port.alias]), stream);
    state_copies++;
    if (has_warned_ || is_building_) continue;
    has_warned_ = true;
    log(Severity::warning, where("run") + ": " + port.name + " has other memory than " +
                               form().inputs[port.alias].name + ", so each step copies the state. Bind both to one " +
                               "address");
  }
}

void Plugin::hold_to_bounds(const PluginTensorDesc* descs, const Sizes& sizes, std::span<const void*> inputs,
                            void* stream) {
  bounded_.reserve(bounded_bytes(form(), descs));
  auto* next = static_cast<char*>(bounded_.data());
  for (const BoundRow& row : form().bounds) {
    auto* const to = reinterpret_cast<int32_t*>(next);
    Bounds bounds{int32_t(evaluate(op_, row.low, sizes)), int32_t(evaluate(op_, row.high, sizes)), nullptr, 0};
    if (row.addend >= 0) {
      bounds.addend = static_cast<const int32_t*>(inputs[row.addend]);
      bounds.sum = int32_t(evaluate(op_, row.sum, sizes));
    }
    const auto* const from = static_cast<const int32_t*>(inputs[row.input]);
    clamp(to, from, int64_t(volume(descs[row.input].dims)), bounds, stream);
    inputs[row.input] = to;
    next += aligned(byte_count(descs[row.input]));
  }
}

nvinfer1::IPluginV3* Plugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return where("new context"); }, [&] {
    std::unique_ptr<Plugin> made(copy_of());
    made->reserve(attribute_sizes(op_, attributes_));
    return made.release();
  });
}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  return guarded<const nvinfer1::PluginFieldCollection*>(nullptr, [&] { return where("serialization"); }, [&] {
    fields_ = attributes_.fields();
    collection_ = {int32_t(fields_.size()), fields_.data()};
    return &collection_;
  });
}

}  // namespace flashnext::trt

// How often a state was copied because its output had other memory than its input.
FLASHNEXT_API int64_t flashnext_state_copies() { return flashnext::trt::state_copies.load(); }
