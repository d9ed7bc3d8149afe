// Tests of last_level_cache.h, on folders that look like the kernel's.
#include "core/last_level_cache.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "scoped.h"

namespace imbrex {
namespace {

std::vector<int> own_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) cores.push_back(i);
  }
  return cores;
}

class LastLevelCache : public testing::Test {
 protected:
  void describe(int core, const std::string& size, const std::string& shared) const {
    const auto cache = folder_.path() / ("cpu" + std::to_string(core)) / "cache" / "index3";
    std::filesystem::create_directories(cache);
    std::ofstream(cache / "size") << size << "\n";
    std::ofstream(cache / "shared_cpu_list") << shared << "\n";
  }
  test::ScopedFolder folder_;
};

TEST_F(LastLevelCache, CountsEachCacheOnce) {
  const auto cores = own_cores();
  ASSERT_FALSE(cores.empty());
  for (int core : cores) describe(core, "32768K", "all of them");
  EXPECT_EQ(last_level_cache_bytes(folder_.path()), int64_t(32) << 20);
  for (int core : cores) describe(core, "16M", std::to_string(core));
  EXPECT_EQ(last_level_cache_bytes(folder_.path()), int64_t(16 * cores.size()) << 20);
  describe(cores.back() + 1, "64M", "of a core that is not ours");
  EXPECT_EQ(last_level_cache_bytes(folder_.path()), int64_t(16 * cores.size()) << 20);
}

TEST_F(LastLevelCache, IsNotKnownWithoutADescription) {
  EXPECT_EQ(last_level_cache_bytes(folder_.path()), 0);
  for (const char* size : {"", "K", "lots", "-5K", "12G", "99999999999999999999K"}) {
    for (int core : own_cores()) describe(core, size, "0");
    EXPECT_EQ(last_level_cache_bytes(folder_.path()), 0) << size;
  }
}

}  // namespace
}  // namespace imbrex
