// See targets.h.
#include "targets.h"

#include "core/cpu_features.h"

namespace imbrex::test {

std::vector<DeviceInfo> test_devices() {
  const DeviceInfo probed = probe_cpu();
  std::vector<DeviceInfo> devices;
  for (CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx}) {
    const bool emulated = isa == CpuIsa::amx_emulated && probed.isa >= CpuIsa::avx512 && cpu_features().missing(isa).empty();
    if (isa > probed.isa && !emulated) continue;
    if (isa == CpuIsa::amx_emulated && !emulated) continue;
    devices.push_back(probed);
    devices.back().isa = isa;
  }
  for (const DeviceInfo& gpu : probe_cuda())
    if (gpu.device.index == 0) devices.push_back(gpu);
  return devices;
}

std::string target_name(const BasicBackend& backend, const DeviceInfo& device) {
  const bool gpu = device.device.type == DeviceType::cuda;
  return std::string(backend.name()) + "__" + (gpu ? "sm_" + std::to_string(device.sm) : to_string(device.isa));
}

}  // namespace imbrex::test
