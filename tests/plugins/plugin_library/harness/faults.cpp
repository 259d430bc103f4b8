// See faults.h. What the plugins call can be made to fail as well: memory of the host and of the device, and launches.
#include "faults.h"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "life.h"

namespace {

int allocations_left = -1;  // until operator new fails; -1: it does not
int64_t allocations = 0;    // that are not freed
bool launches_fail = false, device_is_full = false;

}  // namespace

void* operator new(size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) allocations_left--;
  void* const memory = malloc(bytes);
  if (!memory) throw std::bad_alloc();
  allocations++;
  return memory;
}
void operator delete(void* memory) noexcept {
  allocations -= memory != nullptr;
  free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

// The linker leads calls of the names without __wrap here.
extern "C" {
int32_t __real_flashnext_launch(const char* op, const void* params);
const char* __real_flashnext_message();
void* __real_calloc(size_t count, size_t size);

int32_t __wrap_flashnext_launch(const char* op, const void* params) {
  return launches_fail ? 2 : __real_flashnext_launch(op, params);
}
const char* __wrap_flashnext_message() {
  return launches_fail ? "the launch was made to fail" : __real_flashnext_message();
}
void* __wrap_calloc(size_t count, size_t size) { return device_is_full ? nullptr : __real_calloc(count, size); }
}

namespace harness {
namespace {

class Injector {
 public:
  Injector(const Case& given, Logger& logger) : given_(given), step_(given.steps[0]), logger_(logger) {}

  int run() {
    creation();
    output_types();
    output_shapes();
    formats();
    configuration();
    plans();
    contexts();
    shape_changes();
    execution();
    memory();
    return still_works() ? 0 : 1;
  }

 private:
  void fault(const std::string& name, const std::function<bool()>& is_refused) {
    logger_.count = 0;
    logger_.last[0] = '\0';
    const int64_t before = allocations;
    const bool refused = is_refused();
    // A step keeps what it has reserved for the next one, and the expression builder what it has made.
    const bool keeps = name.rfind("run:", 0) == 0 || name.rfind("shapes:", 0) == 0;
    const bool leaked = allocations > before && !keeps;
    printf("%s\t%s\t%s\n", name.c_str(), !refused ? "ACCEPTED" : leaked ? "LEAKED" : "refused", logger_.last);
  }

  int32_t inputs() const { return int32_t(step_.inputs.size()); }
  int32_t outputs() const { return int32_t(step_.outputs.size()); }

  // --- creation -------------------------------------------------------------------------------------

  void creation() {
    IPluginCreatorV3One* const creator = creator_of(given_.op);
    const auto made = [&](const PluginFieldCollection* fields) {
      return Plugin(creator->createPlugin("layer", fields, TensorRTPhase::kBUILD));
    };
    const PluginFieldCollection nothing{3, nullptr}, negative{-1, nullptr}, many{1 << 30, nullptr};
    fault("create: no collection", [&] { return !made(nullptr); });
    fault("create: no fields", [&] { return !made(&nothing); });
    fault("create: negative count", [&] { return !made(&negative); });
    fault("create: huge count", [&] { return !made(&many); });
    for (size_t i = 0; i < given_.fields.size(); i++) {
      const std::string name = given_.fields[i].name;
      std::vector<PluginField> fields = plugin_fields(given_.fields);
      const PluginFieldCollection all{int32_t(fields.size()), fields.data()};
      const PluginField kept = fields[i];
      const auto with = [&](const std::string& what, const PluginField& changed) {
        fields[i] = changed;
        fault("create: " + name + " " + what, [&] { return !made(&all); });
        fields[i] = kept;
      };
      with("without name", {nullptr, kept.data, kept.type, kept.length});
      with("without data", {kept.name, nullptr, kept.type, kept.length});
      with("of negative length", {kept.name, kept.data, kept.type, -1});
      with("of type 8", {kept.name, kept.data, PluginFieldType::kUNKNOWN, kept.length});
      with("called otherwise", {"other", kept.data, kept.type, kept.length});
    }
  }

  // --- build ----------------------------------------------------------------------------------------

  void output_types() {
    Plugin plugin = create(given_);
    std::vector<DataType> in, out(step_.outputs.size());
    for (const Tensor& tensor : step_.inputs) in.push_back(DataType(tensor.type));
    const auto refused = [&](DataType* to, int32_t to_count, const DataType* from, int32_t from_count) {
      return build(*plugin)->getOutputDataTypes(to, to_count, from, from_count) != 0;
    };
    fault("types: no outputs", [&] { return refused(nullptr, outputs(), in.data(), inputs()); });
    fault("types: no inputs", [&] { return refused(out.data(), outputs(), nullptr, inputs()); });
    fault("types: an output more", [&] { return refused(out.data(), outputs() + 1, in.data(), inputs()); });
    fault("types: an input less", [&] { return refused(out.data(), outputs(), in.data(), inputs() - 1); });
    for (size_t i = 0; i < in.size(); i++) {
      const DataType kept = std::exchange(in[i], in[i] == DataType::kBOOL ? DataType::kINT64 : DataType::kBOOL);
      fault("types: input " + std::to_string(i) + " is BOOL",
            [&] { return refused(out.data(), outputs(), in.data(), inputs()); });
      in[i] = DataType(99);
      fault("types: input " + std::to_string(i) + " is unknown",
            [&] { return refused(out.data(), outputs(), in.data(), inputs()); });
      in[i] = kept;
    }
    for (DataType& type : in) type = DataType::kHALF;
    fault("types: all are HALF", [&] { return refused(out.data(), outputs(), in.data(), inputs()); });
  }

  void output_shapes() {
    Plugin plugin = create(given_);
    ExpressionBuilder builder;
    std::vector<DimsExprs> in = shapes_of(given_, step_, builder), out(step_.outputs.size());
    const auto refused = [&](const DimsExprs* from, int32_t from_count, int32_t shape_count, DimsExprs* to,
                             int32_t to_count) {
      return build(*plugin)->getOutputShapes(from, from_count, nullptr, shape_count, to, to_count, builder) != 0;
    };
    const auto again = [&] { return refused(in.data(), inputs(), 0, out.data(), outputs()); };
    fault("shapes: no inputs", [&] { return refused(nullptr, inputs(), 0, out.data(), outputs()); });
    fault("shapes: no outputs", [&] { return refused(in.data(), inputs(), 0, nullptr, outputs()); });
    fault("shapes: an input less", [&] { return refused(in.data(), inputs() - 1, 0, out.data(), outputs()); });
    fault("shapes: an output less", [&] { return refused(in.data(), inputs(), 0, out.data(), outputs() - 1); });
    fault("shapes: shape inputs", [&] { return refused(in.data(), inputs(), 1, out.data(), outputs()); });
    for (size_t i = 0; i < in.size(); i++) {
      const DimsExprs kept = in[i];
      in[i].nbDims++;
      fault("shapes: input " + std::to_string(i) + " of other rank", again);
      in[i] = kept;
      in[i].d[0] = nullptr;
      fault("shapes: input " + std::to_string(i) + " without expression", again);
      in[i] = kept;
    }
    in.back().d[in.back().nbDims - 1] = builder.constant(987654);
    fault("shapes: another constant", again);
    in = shapes_of(given_, step_, builder);
    const int before = builder.operations;
    again();
    const int needed = builder.operations - before;
    for (builder.left = 0; builder.left <= needed;) {
      const int tried = builder.left;
      if (!again()) break;  // all that the plugin asks for is there
      fault("shapes: builder gives nothing after " + std::to_string(tried), [&] {
        builder.left = tried;
        return again();
      });
      builder.left = tried + 1;
    }
  }

  void formats() {
    Plugin plugin = create(given_);
    const Profile profile = profile_of(given_);
    std::vector<DynamicPluginTensorDesc> all = profile.inputs;
    all.insert(all.end(), profile.outputs.begin(), profile.outputs.end());
    const auto refused = [&](int32_t at, const DynamicPluginTensorDesc* ports, int32_t in, int32_t out) {
      return !build(*plugin)->supportsFormatCombination(at, ports, in, out);
    };
    fault("formats: port -1", [&] { return refused(-1, all.data(), inputs(), outputs()); });
    fault("formats: port too far", [&] { return refused(int32_t(all.size()), all.data(), inputs(), outputs()); });
    fault("formats: nothing", [&] { return refused(0, nullptr, inputs(), outputs()); });
    fault("formats: an input less", [&] { return refused(0, all.data(), inputs() - 1, outputs()); });
    fault("formats: an output more", [&] { return refused(0, all.data(), inputs(), outputs() + 1); });
  }

  void configuration() {
    Plugin plugin = create(given_);
    Profile profile = profile_of(given_);
    const auto refused = [&](const DynamicPluginTensorDesc* in, int32_t in_count, const DynamicPluginTensorDesc* out,
                             int32_t out_count) {
      const bool no_code = !build(*plugin)->configurePlugin(in, in_count, out, out_count);
      const size_t bytes = build(*plugin)->getWorkspaceSize(in, in_count, out, out_count);
      return !no_code && bytes == SIZE_MAX;
    };
    const auto again = [&] { return refused(profile.inputs.data(), inputs(), profile.outputs.data(), outputs()); };
    fault("configure: no inputs", [&] { return refused(nullptr, inputs(), profile.outputs.data(), outputs()); });
    fault("configure: no outputs", [&] { return refused(profile.inputs.data(), inputs(), nullptr, outputs()); });
    fault("configure: an input less",
          [&] { return refused(profile.inputs.data(), inputs() - 1, profile.outputs.data(), outputs()); });
    fault("configure: an output less",
          [&] { return refused(profile.inputs.data(), inputs(), profile.outputs.data(), outputs() - 1); });
    for (size_t i = 0; i < profile.inputs.size(); i++) {
      const std::string name = "configure: input " + std::to_string(i);
      DynamicPluginTensorDesc& input = profile.inputs[i];
      const DynamicPluginTensorDesc kept = input;
      const int32_t last = input.desc.dims.nbDims - 1;
      const auto with = [&](const char* what, const std::function<void()>& change) {
        change();
        fault(name + what, again);
        input = kept;
      };
      with(" in another format", [&] { input.desc.format = TensorFormat::kCHW32; });
      with(" of another dtype", [&] { input.desc.type = DataType::kINT64; });
      with(" of another rank", [&] { input.min.nbDims = input.max.nbDims = last + 2; });
      with(" of negative rank", [&] { input.max.nbDims = -3; });
      with(" of negative size", [&] { input.max.d[last] = -1; });
      with(" of huge size", [&] { input.max.d[last] = int64_t(1) << 40; });
      with(" one too large", [&] { input.max.d[last]++; });
      with(" too small at the least", [&] { input.min.d[last]--; });
    }
    std::swap(profile.inputs[0].min, profile.inputs[0].max);
    if (given_.least[0] != given_.most[0]) fault("configure: a profile upside down", again);
    profile = profile_of(given_);
    profile.outputs[0].desc.type = DataType::kINT64;
    fault("configure: output of another dtype", again);
  }

  // --- runtime --------------------------------------------------------------------------------------

  void plans() {
    Plugin plugin = create(given_);
    const std::vector<Field> good = serialized(*plugin);
    const auto refused = [&](const std::vector<Field>& fields) {
      return !create(given_, TensorRTPhase::kRUNTIME, fields);
    };
    fault("plan: fields of the build phase", [&] { return refused(given_.fields); });
    for (size_t i = 0; i < good.size(); i++) {
      std::vector<Field> bad = good;
      bad.erase(bad.begin() + long(i));
      // `aliased` has a value where it is missing.
      if (good[i].name != "aliased") fault("plan: without " + good[i].name, [&] { return refused(bad); });
      bad = good;
      bad[i].type = int32_t(PluginFieldType::kDIMS);
      fault("plan: " + good[i].name + " of another type", [&] { return refused(bad); });
      bad = good;
      bad.push_back(good[i]);
      fault("plan: " + good[i].name + " twice", [&] { return refused(bad); });
      bad = good;
      bad[i].data.assign(bad[i].data.size(), '\xFF');
      fault("plan: " + good[i].name + " overwritten", [&] { return refused(bad); });
    }
  }

  void contexts() {
    Plugin plugin = create(given_);
    device_is_full = true;
    bool refused = false;
    logger_.count = 0;
    logger_.last[0] = '\0';
    refused = !Plugin(runtime(*plugin)->attachToContext(nullptr));
    device_is_full = false;
    // Only ops with counters need the device's memory here.
    if (refused) printf("attach: no device memory\trefused\t%s\n", logger_.last);
  }

  void shape_changes() {
    Plugin plugin = create(given_);
    Descs descs = descs_of(step_);
    const auto refused = [&](const PluginTensorDesc* in, int32_t in_count, const PluginTensorDesc* out,
                             int32_t out_count) {
      return runtime(*plugin)->onShapeChange(in, in_count, out, out_count) != 0;
    };
    const auto again = [&] { return refused(descs.inputs.data(), inputs(), descs.outputs.data(), outputs()); };
    fault("shape change: no inputs", [&] { return refused(nullptr, inputs(), descs.outputs.data(), outputs()); });
    fault("shape change: no outputs", [&] { return refused(descs.inputs.data(), inputs(), nullptr, outputs()); });
    fault("shape change: an input less",
          [&] { return refused(descs.inputs.data(), inputs() - 1, descs.outputs.data(), outputs()); });
    for (size_t i = 0; i < descs.outputs.size(); i++) {
      descs.outputs[i].dims.d[0]++;
      fault("shape change: output " + std::to_string(i) + " too large", again);
      descs.outputs[i].dims.d[0]--;
    }
    for (size_t i = 0; i < descs.inputs.size(); i++) {
      const PluginTensorDesc kept = descs.inputs[i];
      descs.inputs[i].dims.d[kept.dims.nbDims - 1]--;
      fault("shape change: input " + std::to_string(i) + " too small", again);
      descs.inputs[i] = kept;
    }
  }

  void execution() {
    Plugin plugin = create(given_);
    Descs descs = descs_of(step_);
    Buffers buffers = buffers_of(given_, step_);
    const Memory scratch{workspace(*plugin)};
    const auto refused = [&](const PluginTensorDesc* in, const PluginTensorDesc* out, const void* const* from,
                             void* const* to, void* at) {
      return runtime(*plugin)->enqueue(in, out, from, to, at, nullptr) != 0;
    };
    auto *const in = descs.inputs.data(), *const out = descs.outputs.data();
    const void** const from = buffers.inputs.data();
    void** const to = buffers.outputs.data();
    void* const at = scratch.data();
    const auto again = [&] { return refused(in, out, from, to, at); };
    fault("run: no input descriptions", [&] { return refused(nullptr, out, from, to, at); });
    fault("run: no output descriptions", [&] { return refused(in, nullptr, from, to, at); });
    fault("run: no inputs", [&] { return refused(in, out, nullptr, to, at); });
    fault("run: no outputs", [&] { return refused(in, out, from, nullptr, at); });
    if (workspace(*plugin) > 0) fault("run: no workspace", [&] { return refused(in, out, from, to, nullptr); });
    for (size_t i = 0; i < buffers.inputs.size(); i++) {
      const std::string name = "run: input " + std::to_string(i);
      const void* const kept = std::exchange(from[i], nullptr);
      fault(name + " is nowhere", again);
      from[i] = static_cast<const char*>(kept) + 4;
      fault(name + " is not aligned", again);
      from[i] = kept;
      const int64_t size = std::exchange(in[i].dims.d[in[i].dims.nbDims - 1], 0);
      fault(name + " has no columns", again);
      in[i].dims.d[in[i].dims.nbDims - 1] = size;
    }
    for (size_t i = 0; i < buffers.outputs.size(); i++) {
      void* const kept = std::exchange(to[i], nullptr);
      fault("run: output " + std::to_string(i) + " is nowhere", again);
      to[i] = kept;
    }
    launches_fail = true;
    fault("run: the launch fails", again);
    launches_fail = false;
  }

  // Memory of the host ends at every single allocation of every step.
  void memory() {
    Descs descs = descs_of(step_);
    const std::vector<PluginField> list = plugin_fields(given_.fields);
    const PluginFieldCollection fields{int32_t(list.size()), list.data()};
    IPluginCreatorV3One* const creator = creator_of(given_.op);
    const char* const name = "a layer with a long name";
    starve("create", [&](IPluginV3&) {
      return Plugin(creator->createPlugin(name, &fields, TensorRTPhase::kBUILD)) != nullptr;
    });
    starve("clone", [&](IPluginV3& plugin) { return Plugin(plugin.clone()) != nullptr; });
    starve("attach", [&](IPluginV3& plugin) { return Plugin(runtime(plugin)->attachToContext(nullptr)) != nullptr; });
    starve("serialize", [&](IPluginV3& plugin) { return runtime(plugin)->getFieldsToSerialize() != nullptr; });
    starve("shape change", [&](IPluginV3& plugin) {
      return !runtime(plugin)->onShapeChange(descs.inputs.data(), inputs(), descs.outputs.data(), outputs());
    });
    const auto refuse = [&](IPluginV3& plugin) { return !runtime(plugin)->onShapeChange(nullptr, 0, nullptr, 0); };
    starve("refuse", refuse, 3);
  }

  void starve(const char* what, const std::function<bool(IPluginV3&)>& works, int limit = 200) {
    const Plugin plugin = create(given_);
    for (int left = 0; left < limit; left++) {
      logger_.count = 0;
      const int64_t before = allocations;
      Plugin tried(plugin->clone());
      allocations_left = left;
      const bool worked = works(*tried);
      allocations_left = -1;
      tried.reset();
      if (worked) return;
      printf("memory: %s ends after %d\t%s\t%s\n", what, left, allocations > before ? "LEAKED" : "refused",
             logger_.count ? logger_.last : "");
    }
  }

  int64_t workspace(IPluginV3& plugin) const {
    const Profile profile = profile_of(given_);
    return int64_t(build(plugin)->getWorkspaceSize(profile.inputs.data(), inputs(), profile.outputs.data(), outputs()));
  }

  bool still_works() const {
    Plugin plugin = create(given_);
    const Descs descs = descs_of(step_);
    const Buffers buffers = buffers_of(given_, step_);
    const Memory scratch{workspace(*plugin)};
    return !runtime(*plugin)->enqueue(descs.inputs.data(), descs.outputs.data(), buffers.inputs.data(),
                                      buffers.outputs.data(), scratch.data(), nullptr);
  }

  const Case& given_;
  const Step& step_;
  Logger& logger_;
};

}  // namespace

int inject_faults(const Case& given, Logger& logger) { return Injector(given, logger).run(); }

}  // namespace harness
