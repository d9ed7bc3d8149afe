// Every function of the table, for the fake driver: those that fake_driver.cpp does not define say that they are not supported.
#include "cuda/driver/driver.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace imbrex::cuda {
extern "C" {
constexpr int kNotSupported = 801;
#define X(name, parameters) \
  __attribute__((weak)) CUresult name parameters { return kNotSupported; }
IMBREX_CUDA_DRIVER_API(X)
IMBREX_CUDA_OPTIONAL_DRIVER_API(X)
#undef X
}
}  // namespace imbrex::cuda
