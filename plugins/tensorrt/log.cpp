// The logger, which TensorRT lets a plugin library find.
//
// The interfaces of finder and logger have a method of their own in TensorRT 10; in TensorRT 11 the methods of
// IVersionedInterface come before it. A library may be loaded by a TensorRT of another major version than that of the
// headers it was compiled with, so neither header is used here: the version is asked of the library that the finder's
// own code lies in.
#include "tensorrt/log.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <mutex>

#include "abi.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {

// Not in an unnamed namespace: the compiler would know that nobody implements them.
namespace abi {

struct Logger10 {
  virtual void log(int32_t severity, const char* message) noexcept = 0;
  virtual ~Logger10() = default;
};
struct Finder10 {
  virtual void* find() = 0;
  virtual ~Finder10() = default;
};
struct Versioned {
  virtual int32_t language() const noexcept = 0;
  virtual nvinfer1::InterfaceInfo info() const noexcept = 0;
  virtual ~Versioned() = default;
};
struct Logger11 : Versioned {
  virtual void log(int32_t severity, const char* message) noexcept = 0;
};
struct Finder11 : Versioned {
  virtual void* find() = 0;
};

}  // namespace abi

namespace {

// What is known of the TensorRT that has loaded this library.
struct TensorRT {
  void* finder = nullptr;
  int major = NV_TENSORRT_MAJOR;
  void* (*logger)() = nullptr;  // the logger of its builder or runtime
};

TensorRT made_from(void* finder) {
  TensorRT found{finder};
  Dl_info place{};
  void* const methods = *static_cast<void**>(finder);
  if (!dladdr(methods, &place) || !place.dli_fname) return found;
  void* const library = dlopen(place.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return found;
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  if (version) found.major = version() / 10000;
  found.logger = reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"));
  dlclose(library);
  return found;
}

std::mutex mutex;
TensorRT tensorrt;

// False: TensorRT has no logger. The finder knows that of the engine under way, which there may be none of. The objects
// are not of the classes above, only laid out like them.
__attribute__((no_sanitize("vptr"))) bool log_to_tensorrt(const TensorRT& to, int32_t severity, const char* message) {
  const bool is_versioned = to.major >= 11;
  void* logger = nullptr;
  if (to.finder) {
    logger = is_versioned ? static_cast<abi::Finder11*>(to.finder)->find()
                          : static_cast<abi::Finder10*>(to.finder)->find();
  }
  if (!logger && to.logger) logger = to.logger();
  if (!logger) return false;
  if (is_versioned) {
    static_cast<abi::Logger11*>(logger)->log(severity, message);
  } else {
    static_cast<abi::Logger10*>(logger)->log(severity, message);
  }
  return true;
}

TensorRT current() {
  const std::lock_guard lock(mutex);
  return tensorrt;
}

}  // namespace

void log(Severity severity, const std::string& message) {
  const std::string line = "flashnext: " + message;
  if (log_to_tensorrt(current(), int32_t(severity), line.c_str()) || severity == Severity::info) return;
  fprintf(stderr, "%s\n", line.c_str());
}

void log_plainly(const char* message) noexcept {
  try {
    if (log_to_tensorrt(current(), int32_t(Severity::error), message)) return;
  } catch (...) {
  }
  fprintf(stderr, "%s\n", message);
}

void set_finder(void* finder) {
  const TensorRT found = finder ? made_from(finder) : TensorRT{};
  const std::lock_guard lock(mutex);
  tensorrt = found;
}

}  // namespace flashnext::trt

// TensorRT calls it when it loads the library.
FLASHNEXT_API void setLoggerFinder(nvinfer1::ILoggerFinder* given) { flashnext::trt::set_finder(given); }
