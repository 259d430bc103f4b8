// Messages go to TensorRT's logger where it has given one, to standard error otherwise.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

namespace flashnext::trt {

// Numbers of ILogger::Severity.
enum class Severity { error = 1, warning = 2, info = 3 };

void log(Severity severity, const std::string& message);
void log_plainly(const char* message) noexcept;  // takes no memory

// What is wrong with what TensorRT or the user gave. Thrown inside the library only: `guarded` ends it.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The one way out of a callback: whatever is thrown becomes a logged reason and `failed`. `where` gives the text that
// the reason follows, and is asked for it only then.
template <class Result, class Where, class Body>
Result guarded(Result failed, Where&& where, Body&& body) noexcept {
  try {
    try {
      return body();
    } catch (const std::exception& fault) {
      log(Severity::error, std::string(where()) + ": " + fault.what());
    } catch (...) {
      log(Severity::error, std::string(where()) + ": unknown exception");
    }
  } catch (...) {  // no memory for the message, say
    log_plainly("flashnext: a plugin failed, and then its message");
  }
  return failed;
}

}  // namespace flashnext::trt
