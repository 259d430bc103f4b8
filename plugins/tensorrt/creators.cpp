// The creators, and the functions that TensorRT looks for in a plugin library.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "tensorrt/log.h"
#include "tensorrt/op_table_data.h"
#include "tensorrt/plugin.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {
namespace {

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(const OpRow& op)
      : op_(op), fields_(field_names(op)), collection_{int32_t(fields_.size()), fields_.data()} {}

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override {
    const char* const given = name ? name : "";
    const auto where = [&] { return std::string(op_.name) + ": '" + given + "' cannot be created"; };
    return guarded<nvinfer1::IPluginV3*>(nullptr, where, [&] {
      const bool is_building = phase == nvinfer1::TensorRTPhase::kBUILD;
      return new Plugin(op_, given, Attributes(op_, fields, !is_building), is_building);
    });
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return FLASHNEXT_PLUGIN_VERSION; }
  const char* getPluginNamespace() const noexcept override { return FLASHNEXT_PLUGIN_NAMESPACE; }

 private:
  const OpRow& op_;
  const std::vector<nvinfer1::PluginField> fields_;
  const nvinfer1::PluginFieldCollection collection_;
};

std::vector<nvinfer1::IPluginCreatorInterface*> make_creators() {
  // They live as long as the process: a registry may still hold them when the library's statics go.
  std::vector<nvinfer1::IPluginCreatorInterface*> made;
  for (const OpRow& op : kOps) made.push_back(new Creator(op));
  return made;
}

}  // namespace
}  // namespace flashnext::trt

// TensorRT calls it when it loads the library, and registers what it gives.
FLASHNEXT_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  using Creators = std::vector<nvinfer1::IPluginCreatorInterface*>;
  count = 0;
  const auto all = flashnext::trt::guarded<const Creators*>(nullptr, [] { return "creators"; }, [] {
    static const Creators* const creators = new Creators(flashnext::trt::make_creators());
    return creators;
  });
  if (!all) return nullptr;
  count = int32_t(all->size());
  return all->data();
}
