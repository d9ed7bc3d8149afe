#pragma once
// Where the backends of a family run on this machine, for the tests that walk over them: each on every device that changes its kernels.
#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "conformance/attention/device_mirror.h"
#include "conformance/poison.h"
#include "conformance/recurrent/device_mirror.h"
#include "conformance/short_conv/device_mirror.h"
#include "imbrex/family.h"

namespace imbrex::test {

// This CPU once for every instruction set it can run, amx_emulated included; and the first GPU, where there is one.
std::vector<DeviceInfo> test_devices();

// Every backend of a family, as it runs on tensors in host memory: on a GPU through a mirror.
template <class Family>
std::vector<const BackendOf<Family>*> test_backends(const DeviceInfo& device) {
  // The map is never destroyed, because the driver may be gone before static objects are.
  static auto& mirrors = *new std::map<const BackendOf<Family>*, std::unique_ptr<BackendOf<Family>>>;
  std::vector<const BackendOf<Family>*> result = backends<Family>();
  for (const BackendOf<Family>*& backend : result) {
    if constexpr (requires { device_mirror(*backend); }) {  // a family without kernels for GPUs has none
      if (device.device.type != DeviceType::cuda) continue;
      std::unique_ptr<BackendOf<Family>>& mirror = mirrors[backend];
      if (!mirror) mirror = device_mirror(*backend);
      backend = mirror.get();
    }
  }
  return result;
}

// What is put around requests instead of NaN, for the same bits: on a GPU, where nothing else waits, both kinds; elsewhere one of them.
inline std::vector<Poison> other_poisons(uint64_t seed, bool on_gpu) {
  if (on_gpu) return {Poison::zero, Poison::ones};
  return {seed % 2 == 0 ? Poison::zero : Poison::ones};
}

std::string target_name(const BasicBackend&, const DeviceInfo&);  // "cpu_avx512__avx2", "cuda_sm80__sm_90"

// Calls add(backend, device) for every backend on every device where its kernels are others. kernels_of(backend, device) names them, and is
// empty where it runs nothing.
template <class Family, class KernelsOf, class Add>
void for_each_target(KernelsOf kernels_of, Add add) {
  std::set<std::string> seen;
  for (size_t i = 0; i < backends<Family>().size(); ++i)
    for (const DeviceInfo& device : test_devices()) {
      const BackendOf<Family>* const backend = test_backends<Family>(device)[i];
      const std::string kernels = kernels_of(*backend, device);
      if (!kernels.empty() && seen.insert(std::string(backend->name()) + " " + kernels).second) add(backend, device);
    }
}

// A cache of what is made of a case, for the last `count` cases.
template <class T, size_t count, class Case, class Make>
const T& kept(const Case& c, Make make) {
  static std::array<std::pair<const Case*, T>, count> last;
  static size_t next = 0;
  for (const auto& [of, value] : last)
    if (of == &c) return value;
  auto& slot = last[next++ % count];
  slot = {&c, make(c)};
  return slot.second;
}

}  // namespace imbrex::test
