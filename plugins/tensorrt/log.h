// Messages go to TensorRT's logger where it has given one, to standard error otherwise.
#pragma once

#include <stdexcept>
#include <string>

namespace flashnext::trt {

// Numbers of ILogger::Severity.
enum class Severity { error = 1, warning = 2, info = 3 };

void log(Severity severity, const std::string& message);

// What is wrong with what TensorRT or the user gave. Thrown inside the library only: `guarded` ends it.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The one way out of a callback: whatever is thrown becomes a logged reason and `failed`.
template <class Result, class Body>
Result guarded(const std::string& where, Result failed, Body&& body) noexcept {
  try {
    try {
      return body();
    } catch (const std::exception& fault) {
      log(Severity::error, where + ": " + fault.what());
    } catch (...) {
      log(Severity::error, where + ": unknown exception");
    }
  } catch (...) {  // no memory for the message, say
  }
  return failed;
}

}  // namespace flashnext::trt
