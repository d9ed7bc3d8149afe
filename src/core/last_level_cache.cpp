// Reads the system's description of caches from files. (glibc's sysconf(_SC_LEVEL3_CACHE_SIZE) counts every L3 of an AMD processor, even in
// a virtual machine that has only one of them.)
#include "core/last_level_cache.h"

#include <sched.h>

#include <charconv>
#include <fstream>
#include <set>

namespace imbrex {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32768K" or "1M"; 0 for anything else.
int64_t parse_size(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number > (int64_t(1) << 32)) return 0;
  const std::string unit(end, text.data() + text.size());
  return unit == "K" ? number << 10 : unit == "M" ? number << 20 : unit.empty() ? number : 0;
}

}  // namespace

int64_t last_level_cache_bytes(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 0;  // more than 1024 cores do not fit the set
  std::set<std::string> seen;                                  // a cache is told by the cores that share it
  int64_t bytes = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &set)) continue;
    const std::string cache = root + "/cpu" + std::to_string(core) + "/cache/index3";
    const std::string cores = first_line(cache + "/shared_cpu_list");
    if (!cores.empty() && seen.insert(cores).second) bytes += parse_size(first_line(cache + "/size"));
  }
  return bytes;
}

}  // namespace imbrex
