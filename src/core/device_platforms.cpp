// Platforms of devices: CUDA, and those from outside, which register at run time; and what a device does whose platform has no more to say.
#include "imbrex/device_platform.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "core/check.h"
#include "core/gpus.h"
#include "core/platform_names.h"
#include "core/scratch_of_plans.h"
#include "core/tensor_format.h"

namespace imbrex {

std::shared_ptr<const DevicePlatform> cuda_platform();  // cuda/platform.cpp

namespace {

struct Registered {
  std::mutex mutex;
  std::deque<std::string> names;                                 // by count; they stay where they are
  std::vector<std::shared_ptr<const DevicePlatform>> platforms;  // the same; null: unregistered
};

// Never destroyed, so that devices can be named while static objects go down. A fork waits for the lock, because a child would never see it
// free that another thread of its parent held.
Registered& registered() {
  static auto* const state = [] {
    const auto unlock = [] { registered().mutex.unlock(); };
    pthread_atfork([] { registered().mutex.lock(); }, unlock, unlock);
    return new Registered;
  }();
  return *state;
}

bool is_platform_name(std::string_view name) {
  const auto lower = [](char c) { return c >= 'a' && c <= 'z'; };
  return !name.empty() && lower(name[0]) &&
         std::ranges::all_of(name, [&](char c) { return lower(c) || (c >= '0' && c <= '9') || c == '_'; });
}

}  // namespace

const char* platform_name(int index) {
  Registered& state = registered();
  const std::lock_guard lock(state.mutex);
  const auto count = size_t(index / kMostDevices);
  return index >= 0 && count < state.names.size() ? state.names[count].c_str() : "plugin";
}

void register_platform(std::shared_ptr<const DevicePlatform> platform) {
  check(platform != nullptr, "registry.null", "a platform to register, got a null pointer");
  const std::string name(platform->name());
  check(is_platform_name(name) && !is_described_device(name), "registry.name",
        "expected a name for devices of a lower-case letter, then lower-case letters, digits and _, that no device has yet, got \"{}\"",
        name);
  Registered& state = registered();
  const std::lock_guard lock(state.mutex);
  const bool taken = std::ranges::any_of(state.platforms, [&](const auto& other) { return other && other->name() == name; });
  check(!taken, "registry.duplicate", "a platform named \"{}\" is there already", name);
  state.names.push_back(name);
  state.platforms.push_back(std::move(platform));
}

void unregister_platform(std::string_view name) {
  std::shared_ptr<const DevicePlatform> last;  // let go of without the lock
  Registered& state = registered();
  const std::lock_guard lock(state.mutex);
  const auto it = std::ranges::find_if(state.platforms, [&](const auto& platform) { return platform && platform->name() == name; });
  check(it != state.platforms.end(), "registry.unknown", "no platform named \"{}\" was registered at run time", name);
  std::swap(*it, last);
}

std::vector<std::shared_ptr<const DevicePlatform>> platforms() {
  Registered& state = registered();
  const std::lock_guard lock(state.mutex);
  std::vector<std::shared_ptr<const DevicePlatform>> all;
  std::ranges::copy_if(state.platforms, std::back_inserter(all), [](const auto& platform) { return platform != nullptr; });
  return all;
}

std::vector<DeviceInfo> devices_of(std::string_view name, std::string* why) {
  std::shared_ptr<const DevicePlatform> platform;
  int count = 0;
  {
    Registered& state = registered();
    const std::lock_guard lock(state.mutex);
    const auto it = std::ranges::find_if(state.platforms, [&](const auto& p) { return p && p->name() == name; });
    if (it == state.platforms.end()) return {};
    platform = *it, count = int(it - state.platforms.begin());
  }
  std::vector<DeviceInfo> devices = platform->devices(why);
  check(devices.size() <= size_t(kMostDevices), "device.many", "expected at most {} devices of {}, got {}", kMostDevices, name,
        devices.size());
  for (size_t i = 0; i < devices.size(); ++i) devices[i].device = {DeviceType::plugin, count * kMostDevices + int(i)};
  return devices;
}

std::vector<DeviceInfo> probe_plugins() {
  std::vector<DeviceInfo> all;
  for (const auto& platform : platforms())
    for (DeviceInfo& device : devices_of(platform->name(), nullptr)) all.push_back(std::move(device));
  return all;
}

bool is_platform(std::string_view name) {
  return std::ranges::any_of(platforms(), [&](const auto& platform) { return platform->name() == name; });
}

std::shared_ptr<const DevicePlatform> platform_of(const Device& device) {
  check(device.type != DeviceType::cpu, "device.absent", "expected a device with a platform, got {}", device);
  if (device.type == DeviceType::cuda) return cuda_platform();
  Registered& state = registered();
  const std::lock_guard lock(state.mutex);
  const auto count = size_t(device.index / kMostDevices);
  if (device.index >= 0 && count < state.platforms.size() && state.platforms[count]) return state.platforms[count];
  fail("device.absent", "expected a device that is registered, got number {} of plug-ins, which is not", device.index);
}

int number_of(const Device& device) { return device.type == DeviceType::plugin ? device.index % kMostDevices : device.index; }

OpenDevicePtr open_device(const DeviceInfo& info) {
  check(info.present, "backend.device_absent", "expected a device of this machine, got {}", info.str());
  return platform_of(info.device)->open(info.device);
}

// --- what a platform need not bring

void OpenDevice::gather(const TensorView& from, const TensorView& offsets, const TensorView& to, Stream stream) const {
  const int64_t size = size_of(from.dtype), row = to.size(1) * size, rows = to.size(0);
  const std::shared_ptr<void> on_host = allocate_host(rows * size_of(DType::i32));
  const auto* const starts = static_cast<const int32_t*>(on_host.get());
  download(on_host.get(), offsets.data, rows * size_of(DType::i32), stream);
  synchronize(stream);
  for (int64_t i = 0; i < rows; ++i) copy(to.as<char>() + i * row, from.as<const char>() + starts[i] * size, row, stream);
}

std::shared_ptr<Workspace> OpenDevice::make_workspace() const { return scratch_of_plans(device()); }
std::shared_ptr<Workspace> OpenDevice::make_workspace(void*, int64_t) const { return scratch_of_plans(device()); }

bool DevicePlatform::is_captured(const Device& device, Stream stream) const { return capture_of(device, stream) != 0; }
uint64_t DevicePlatform::capture_of(const Device&, Stream) const { return 0; }
void DevicePlatform::keep_for_capture(const Device&, Stream, std::shared_ptr<void>&&) const {
  fail("stream.capture", "expected a device whose graphs can keep what they use, got one of {}", name());
}

}  // namespace imbrex
