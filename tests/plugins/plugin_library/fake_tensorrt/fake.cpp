// A TensorRT that has only a version, a logger and a logger finder, laid out as in version MAJOR (10 or 11), whatever
// the version of the headers. `provoke` asks a plugin library's creator for a plugin without fields.
#include <cstdint>
#include <cstdio>

#include "tensorrt/trt.h"

namespace fake {

char logged[1024];

struct Versioned {
  virtual int32_t getAPILanguage() const noexcept { return 0; }
  virtual nvinfer1::InterfaceInfo getInterfaceInfo() const noexcept { return {"", 1, 0}; }
  virtual ~Versioned() = default;
};
struct Plain {};

#if MAJOR >= 11
using Base = Versioned;
#else
using Base = Plain;
#endif

struct Logger : Base {
  virtual void log(int32_t severity, const char* message) noexcept {
    snprintf(logged, sizeof logged, "%d %s", severity, message);
  }
  virtual ~Logger() = default;
};
struct Finder : Base {
  virtual Logger* findLogger() { return logger; }
  virtual ~Finder() = default;
  Logger* logger = nullptr;
};

Logger logger;
Finder finder;
bool has_global_logger = false;

}  // namespace fake

extern "C" {

int32_t getInferLibVersion() noexcept { return MAJOR * 10000 + 400; }
// Declared by the headers, whose ILogger may be laid out otherwise.
nvinfer1::ILogger* getLogger() noexcept {
  return fake::has_global_logger ? reinterpret_cast<nvinfer1::ILogger*>(&fake::logger) : nullptr;
}

// `where`: 0: nobody has a logger, 1: the finder, 2: only the library itself.
using Creators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t&);
const char* provoke(void (*set_finder)(void*), Creators creators, int where) {
  fake::logged[0] = '\0';
  fake::finder.logger = where == 1 ? &fake::logger : nullptr;
  fake::has_global_logger = where == 2;
  set_finder(&fake::finder);
  int32_t count = 0;
  auto* const creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators(count)[0]);
  creator->createPlugin("layer", nullptr, nvinfer1::TensorRTPhase::kBUILD);
  return fake::logged;
}
}
