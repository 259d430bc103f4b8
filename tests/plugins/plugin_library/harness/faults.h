// Faults put into every step of a plugin's life. Each has to come back as an error code, with a reason in the log.
#pragma once

#include "case_file.h"
#include "tensorrt_side.h"

namespace harness {

// Prints a line per fault: name, "refused" or "ACCEPTED", the log. 0: the plugin still works after all of them.
int inject_faults(const Case& given, Logger& logger);

}  // namespace harness
