// Everything that a kernel source needs in place of CUDA's headers when g++ compiles it for the host execution.
#pragma once

#include "host/collectives.h"
#include "host/counting.h"
#include "host/intrinsics.h"
#include "host/keywords.h"
#include "host/runtime.h"
