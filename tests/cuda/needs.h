#pragma once
// Skips a test of CUDA code, with a reason, on a machine that lacks what it needs.
#include <gtest/gtest.h>

#include "cuda/driver/driver.h"

#define NEEDS_NVRTC()                                              \
  do {                                                             \
    std::string why;                                               \
    if (imbrex::cuda::nvrtc(&why) == nullptr) GTEST_SKIP() << why; \
  } while (false)

// A driver that works, and a device.
#define NEEDS_GPU()                                                 \
  do {                                                              \
    std::string why;                                                \
    if (imbrex::cuda::driver(&why) == nullptr) GTEST_SKIP() << why; \
  } while (false)
