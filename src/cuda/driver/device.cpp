// probe_cuda(): the GPUs of this machine, by the driver's attributes; no context is made.
#include <fmt/format.h>

#include "core/gpus.h"
#include "cuda/driver/driver.h"
#include "imbrex/device.h"

namespace imbrex {

std::vector<DeviceInfo> probe_cuda(std::string* why) {
  using namespace cuda;
  std::string reason;
  std::vector<DeviceInfo> devices;
  if (const DriverApi* cu = driver(&reason)) {
    int count = 0;
    check_cuda(cu->cuDeviceGetCount(&count), "count the CUDA devices");
    for (int index = 0; index < count; ++index) {
      CUdevice device = 0;
      check_cuda(cu->cuDeviceGet(&device, index), "get cuda:{}", index);
      const auto attribute = [&](int which) {
        int value = 0;
        check_cuda(cu->cuDeviceGetAttribute(&value, which, device), "read attribute {} of cuda:{}", which, index);
        return value;
      };
      char name[256] = {};
      size_t bytes = 0;
      check_cuda(cu->cuDeviceGetName(name, int(sizeof name) - 1, device), "read the name of cuda:{}", index);
      check_cuda(cu->cuDeviceTotalMem_v2(&bytes, device), "read the memory size of cuda:{}", index);
      devices.push_back({.device = {DeviceType::cuda, index},
                         .name = name,
                         .sm = attribute(kDeviceMajor) * 10 + attribute(kDeviceMinor),
                         .num_workers = attribute(kDeviceMultiprocessors),
                         .l2_bytes = attribute(kDeviceL2Bytes),
                         .memory_bytes = int64_t(bytes),
                         .max_smem_bytes = attribute(kDeviceSmemPerBlockOptIn),
                         .isa_note = {}});
      add_peaks(devices.back());
    }
    if (count == 0) reason = "the NVIDIA driver sees no device";
  }
  if (why) *why = reason;
  return devices;
}

}  // namespace imbrex
