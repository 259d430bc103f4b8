// The C interface of a kernel library, the same for the nvcc build and for the host execution.
//
// An op is known by its folder's name. A caller fills the op's parameter struct (<op>/params.h; zero where a field does
// not apply), asks how much workspace it takes, sets `workspace`, and launches. Nothing throws and nothing exits.
#pragma once

#include <cstdint>

#include "common/status.h"

#define FLASHNEXT_API extern "C" __attribute__((visibility("default")))

// Bytes of the op's parameter struct, so that a caller can check its own idea of it; 0 for an unknown op.
FLASHNEXT_API int64_t flashnext_params_size(const char* op);
// Bytes of workspace (aligned to 16) for these sizes, which need not be cleared.
FLASHNEXT_API int64_t flashnext_workspace(const char* op, const void* params);
// 0: launched; otherwise `flashnext_message` says what was wrong.
FLASHNEXT_API int32_t flashnext_launch(const char* op, const void* params);
// About this thread's last failed launch.
FLASHNEXT_API const char* flashnext_message();

namespace flashnext {

struct OpEntry {
  const char* name;
  int64_t params_size;
  int64_t (*workspace)(const void*);
  Status (*launch)(const void*);
};

bool register_op(const OpEntry& entry);

// At the end of an op's kernel.cu; expects launch(const Params&) and workspace_bytes(const Params&).
#define REGISTER_OP(name, Params)                                                                       \
  static const bool registered_##name = ::flashnext::register_op(                                       \
      {#name, sizeof(Params),                                                                           \
       [](const void* p) { return ::flashnext::workspace_bytes(*static_cast<const Params*>(p)); },      \
       [](const void* p) { return ::flashnext::launch(*static_cast<const Params*>(p)); }})

}  // namespace flashnext
