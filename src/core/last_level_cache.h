#pragma once
// The size of the last-level caches of the cores that this process may use.
#include <cstdint>
#include <string>

namespace imbrex {

// Bytes of the L3 caches that the cores this process may use belong to, each cache once; 0 where `root`, a folder like Linux's
// /sys/devices/system/cpu, does not say.
int64_t last_level_cache_bytes(const std::string& root = "/sys/devices/system/cpu");

}  // namespace imbrex
