// Plays TensorRT for one case: leads the plugin through its whole life, or puts faults into it.
//
//     harness life CASE RESULT       # the outputs go to RESULT, what was seen to standard output
//     harness faults CASE            # a line per fault: name, outcome, what was logged
//     harness timing CASE ROUNDS     # runs a plugin of the build phase on memory that nobody filled
//     harness workspace CASE         # configures it and prints the workspace; the tensors need no data
//
// Exits with 0 unless a callback answers otherwise than it must; says where.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "case_file.h"
#include "faults.h"
#include "life.h"
#include "tensorrt_side.h"

using namespace harness;

extern "C" {
IPluginCreatorInterface* const* getCreators(int32_t& count);
void setLoggerFinder(ILoggerFinder* finder);
int64_t flashnext_state_copies();
}

IPluginCreatorInterface* const* getCreators_(int32_t& count) { return getCreators(count); }

namespace {

LoggerFinder finder;

#define REQUIRE(condition)                                                                             \
  do {                                                                                                 \
    if (!(condition)) {                                                                                \
      fprintf(stderr, "harness: line %d: not true: %s\n  logged: %s\n", __LINE__, #condition,          \
              finder.logger.last);                                                                     \
      exit(1);                                                                                         \
    }                                                                                                  \
  } while (false)

void check_names(const Case& given, IPluginV3& plugin) {
  REQUIRE(core(plugin) && build(plugin) && runtime(plugin));
  REQUIRE(!plugin.getCapabilityInterface(PluginCapabilityType(7)));
  REQUIRE(core(plugin)->getPluginName() == given.op);
  REQUIRE(!strcmp(core(plugin)->getPluginVersion(), "1"));
  REQUIRE(!strcmp(core(plugin)->getPluginNamespace(), ""));
}

void check_types(const Case& given, IPluginV3& plugin) {
  const Step& step = given.steps[0];
  std::vector<DataType> inputs, outputs(step.outputs.size(), DataType::kBOOL);
  for (const Tensor& tensor : step.inputs) inputs.push_back(DataType(tensor.type));
  REQUIRE(build(plugin)->getNbOutputs() == int32_t(outputs.size()));
  REQUIRE(!build(plugin)->getOutputDataTypes(outputs.data(), int32_t(outputs.size()), inputs.data(),
                                             int32_t(inputs.size())));
  for (size_t i = 0; i < outputs.size(); i++) REQUIRE(int32_t(outputs[i]) == step.outputs[i].type);
}

void check_shapes(const Case& given, const Step& step, IPluginV3& plugin) {
  ExpressionBuilder builder;
  const std::vector<DimsExprs> inputs = shapes_of(given, step, builder);
  std::vector<DimsExprs> outputs(step.outputs.size());
  REQUIRE(!build(plugin)->getOutputShapes(inputs.data(), int32_t(inputs.size()), nullptr, 0, outputs.data(),
                                          int32_t(outputs.size()), builder));
  for (size_t i = 0; i < outputs.size(); i++) {
    REQUIRE(size_t(outputs[i].nbDims) == step.outputs[i].dims.size());
    for (int32_t d = 0; d < outputs[i].nbDims; d++) {
      REQUIRE(static_cast<const Expression*>(outputs[i].d[d])->value == step.outputs[i].dims[size_t(d)]);
    }
  }
}

// Every dtype and format at every port, the ports before it being as they are: prints what is accepted.
void negotiate(const Case& given, IPluginV3& plugin) {
  Profile profile = profile_of(given);
  std::vector<DynamicPluginTensorDesc> ports = profile.inputs;
  ports.insert(ports.end(), profile.outputs.begin(), profile.outputs.end());
  const auto inputs = int32_t(profile.inputs.size()), outputs = int32_t(profile.outputs.size());
  for (int32_t port = 0; port < inputs + outputs; port++) {
    const PluginTensorDesc kept = ports[size_t(port)].desc;
    for (int32_t type = 0; type <= 11; type++) {
      for (int32_t format = 0; format <= 12; format++) {
        ports[size_t(port)].desc.type = DataType(type);
        ports[size_t(port)].desc.format = TensorFormat(format);
        if (build(plugin)->supportsFormatCombination(port, ports.data(), inputs, outputs)) {
          printf("accepts %d %d %d\n", port, type, format);
        }
      }
    }
    ports[size_t(port)].desc = kept;
  }
}

size_t configure(const Case& given, IPluginV3& plugin) {
  const Profile profile = profile_of(given);
  const auto inputs = int32_t(profile.inputs.size()), outputs = int32_t(profile.outputs.size());
  REQUIRE(!build(plugin)->configurePlugin(profile.inputs.data(), inputs, profile.outputs.data(), outputs));
  for (int32_t i = 0; i < outputs; i++) printf("alias %d %d\n", i, build(plugin)->getAliasedInput(i));
  return build(plugin)->getWorkspaceSize(profile.inputs.data(), inputs, profile.outputs.data(), outputs);
}

void run(const Case& given, const Step& step, IPluginV3& plugin, size_t workspace, FILE* result) {
  const Descs descs = descs_of(step);
  REQUIRE(!runtime(plugin)->setTactic(0));
  REQUIRE(!runtime(plugin)->onShapeChange(descs.inputs.data(), int32_t(descs.inputs.size()), descs.outputs.data(),
                                          int32_t(descs.outputs.size())));
  const Buffers buffers = buffers_of(given, step);
  const Memory scratch{int64_t(workspace)};
  REQUIRE(!runtime(plugin)->enqueue(descs.inputs.data(), descs.outputs.data(), buffers.inputs.data(),
                                    buffers.outputs.data(), scratch.data(), nullptr));
  for (size_t i = 0; i < step.outputs.size(); i++) {
    fwrite(buffers.outputs[i], 1, size_t(step.outputs[i].bytes), result);
  }
}

int live(const Case& given, const char* path) {
  FILE* const result = fopen(path, "wb");
  REQUIRE(result);
  Plugin first = create(given);
  REQUIRE(first);
  check_names(given, *first);
  Plugin plugin(first->clone());
  first.reset();
  REQUIRE(plugin);
  check_names(given, *plugin);
  check_types(given, *plugin);
  for (const Step& step : given.steps) check_shapes(given, step, *plugin);
  negotiate(given, *plugin);
  const size_t workspace = configure(given, *plugin);
  printf("workspace %zu\n", workspace);
  // The builder times plugins before it writes the plan.
  for (const Step& step : given.steps) run(given, step, *plugin, workspace, result);
  printf("timing %s\n", build(*plugin)->getTimingCacheID());

  const std::vector<Field> fields = serialized(*plugin);
  REQUIRE(!fields.empty());
  plugin.reset();
  Plugin loaded = create(given, TensorRTPhase::kRUNTIME, fields);
  REQUIRE(loaded);
  check_names(given, *loaded);
  REQUIRE(serialized(*loaded).size() == fields.size());
  Context context;
  // Two contexts take turns, and one of them ends before the other.
  Plugin attached(runtime(*loaded)->attachToContext(&context));
  Plugin other(runtime(*loaded)->attachToContext(&context));
  REQUIRE(attached && other && attached.get() != loaded.get());
  for (const Step& step : given.steps) {
    run(given, step, *attached, workspace, result);
    if (other) run(given, step, *other, workspace, result);
    other.reset();
  }
  Plugin copied(attached->clone());
  REQUIRE(copied);
  attached.reset();
  printf("copies %" PRId64 "\n", flashnext_state_copies());
  printf("logged %d %s\n", finder.logger.count, finder.logger.last);
  return fclose(result);
}

int time_on_garbage(const Case& given, int rounds) {
  Plugin plugin = create(given);
  REQUIRE(plugin);
  const size_t workspace = configure(given, *plugin);
  std::mt19937 random(1);
  for (int round = 0; round < rounds; round++) {
    Case filled = given;
    for (Step& step : filled.steps) {
      for (Tensor& tensor : step.inputs) {
        // Every bit set, none, or by chance.
        tensor.data.assign(size_t(tensor.bytes), round == 0 ? '\xFF' : '\0');
        for (char& byte : tensor.data) byte = round < 2 ? byte : char(random());
      }
      const Descs descs = descs_of(step);
      Buffers buffers = buffers_of(filled, step);
      const Memory scratch{int64_t(workspace)};
      REQUIRE(!runtime(*plugin)->onShapeChange(descs.inputs.data(), int32_t(descs.inputs.size()),
                                               descs.outputs.data(), int32_t(descs.outputs.size())));
      REQUIRE(!runtime(*plugin)->enqueue(descs.inputs.data(), descs.outputs.data(), buffers.inputs.data(),
                                         buffers.outputs.data(), scratch.data(), nullptr));
    }
  }
  printf("rounds %d\n", rounds);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count > 2 ? arguments[1] : "";
  setLoggerFinder(&finder);
  if (mode == "life" && count == 4) return live(read_case(arguments[2]), arguments[3]);
  if (mode == "faults" && count == 3) return inject_faults(read_case(arguments[2]), finder.logger);
  if (mode == "workspace" && count == 3) {
    const Case given = read_case(arguments[2]);
    const Plugin plugin = create(given);
    REQUIRE(plugin);
    printf("workspace %zu\n", configure(given, *plugin));
    return 0;
  }
  if (mode == "timing" && count == 4) return time_on_garbage(read_case(arguments[2]), atoi(arguments[3]));
  fprintf(stderr, "usage: harness life CASE RESULT | faults CASE | timing CASE ROUNDS | workspace CASE\n");
  return 2;
}
