// What a library file says about itself. library.py finds it in the file's bytes, without loading the library.
#include "abi.h"
#include "tensorrt/op_table_data.h"
#include "tensorrt/trt.h"

// library.py gives both: FLASHNEXT_CAPABILITIES, separated by spaces, the last with PTX, none on the host execution;
// and FLASHNEXT_SOURCES, a hash of all that the library is made from.
#if !defined(FLASHNEXT_CAPABILITIES) || !defined(FLASHNEXT_SOURCES)
#error "define FLASHNEXT_CAPABILITIES and FLASHNEXT_SOURCES"
#endif

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
#define HEADERS TEXT(NV_TENSORRT_MAJOR) "." TEXT(NV_TENSORRT_MINOR) "." TEXT(NV_TENSORRT_PATCH)

namespace {

constexpr char kInfo[] =
    "flashnext-plugins:"
    "{\"op_version\": " TEXT(FLASHNEXT_OP_VERSION) ", \"op_table\": \"" FLASHNEXT_OP_TABLE
    "\", \"tensorrt_headers\": \"" HEADERS "\", \"capabilities\": \"" FLASHNEXT_CAPABILITIES
    "\", \"sources\": \"" FLASHNEXT_SOURCES "\"}";

}  // namespace

// The JSON object as text.
FLASHNEXT_API const char* flashnext_plugins_info() { return kInfo + sizeof("flashnext-plugins:") - 1; }
