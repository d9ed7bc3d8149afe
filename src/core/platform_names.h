#pragma once
// What names of devices need to know of each other: those of platforms from outside, and those that stand for devices anyway.
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/device.h"

namespace imbrex {

// Of a device {DeviceType::plugin, index}, also of one that is unregistered; else "plugin". Lives as long as the process.
const char* platform_name(int index);
bool is_platform(std::string_view name);
std::vector<DeviceInfo> devices_of(std::string_view name, std::string* why);  // of a platform from outside; none, if there is no such
bool is_described_device(std::string_view name);                              // "cpu", "cuda", "h200", "avx512"; in device.cpp

}  // namespace imbrex
