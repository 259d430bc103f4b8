// What a launch returns. Nothing here exits or throws: the caller decides what a failure means.
#pragma once

#include <cstdint>

namespace flashnext {

// `message` is a literal, or belongs to the runtime until the next launch.
struct Status {
  int32_t code = 0;  // 0: launched; kRejected: the arguments are wrong; kFailed: the launch failed
  const char* message = "";
  explicit operator bool() const { return code == 0; }
};

constexpr int32_t kRejected = 1;
constexpr int32_t kFailed = 2;

inline Status rejected(const char* message) { return {kRejected, message}; }

}  // namespace flashnext
