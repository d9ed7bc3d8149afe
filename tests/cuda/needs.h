#pragma once
// What a test of CUDA code needs of the machine: without it the test is skipped, with the reason.
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
