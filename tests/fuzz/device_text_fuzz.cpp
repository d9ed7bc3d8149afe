// Fuzzes the texts that name a device: each is refused with a code, or is a device that can be told of.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "imbrex/device.h"
#include "imbrex/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace imbrex;
  try {
    const DeviceInfo device = describe_device({reinterpret_cast<const char*>(data), size});
    if (device.str().empty() || device.num_workers < 1) abort();
  } catch (const Error& error) {
    const std::string_view code = error.code();
    if (!code.starts_with("device.") && !code.starts_with("cuda.")) abort();
  }
  return 0;
}
