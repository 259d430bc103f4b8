// The C interface over the registered ops; see abi.h.
#include "abi.h"

#include <cstring>
#include <string>
#include <vector>

namespace flashnext {
namespace {

// A function's static: registrations run before main, in no particular order.
std::vector<OpEntry>& entries() {
  static std::vector<OpEntry> list;
  return list;
}

const OpEntry* find(const char* name) {
  for (const OpEntry& entry : entries()) {
    if (strcmp(entry.name, name) == 0) return &entry;
  }
  return nullptr;
}

thread_local std::string message;

}  // namespace

bool register_op(const OpEntry& entry) {
  entries().push_back(entry);
  return true;
}

}  // namespace flashnext

int64_t flashnext_params_size(const char* op) {
  const auto* entry = flashnext::find(op);
  return entry ? entry->params_size : 0;
}

int64_t flashnext_workspace(const char* op, const void* params) {
  const auto* entry = flashnext::find(op);
  return entry ? entry->workspace(params) : 0;
}

int32_t flashnext_launch(const char* op, const void* params) {
  const auto* entry = flashnext::find(op);
  const auto status = entry ? entry->launch(params) : flashnext::rejected("this library has no such op");
  if (!status) flashnext::message = status.message;
  return status.code;
}

const char* flashnext_message() { return flashnext::message.c_str(); }
