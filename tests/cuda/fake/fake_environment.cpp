// Puts the fake driver and an empty kernel cache in place before any test asks for them, and finds the fake's state.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "cuda/fake/fake_driver.h"

namespace imbrex::cuda::fake {

State& state() {
  static State* const the_state = [] {
    void* library = dlopen(IMBREX_FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::abort();
    return reinterpret_cast<State* (*)()>(dlsym(library, "fake_driver_state"))();
  }();
  return *the_state;
}

namespace {

// In memory where the machine has a folder there: a plan's kernels are files of a line each, and tests make thousands of plans.
std::string cache_folder() {
  const std::filesystem::path memory = "/dev/shm";
  const auto parent = access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path();
  return (parent / ("imbrex_fake_cache_" + std::to_string(getpid()))).string();
}
const std::string kCache = cache_folder();

// Environments are set up before the first test and torn down after the last: nothing may be left over then.
class FakeEnvironment : public testing::Environment {
  void SetUp() override {
    setenv("IMBREX_CUDA_DRIVER", IMBREX_FAKE_DRIVER, 1);
    setenv("IMBREX_CUDA_CUBLASLT", IMBREX_FAKE_DRIVER, 1);
    setenv("IMBREX_CUDA_CACHE", kCache.c_str(), 1);
    unsetenv("IMBREX_CUDA_DUMP");
  }
  void TearDown() override {
    std::filesystem::remove_all(kCache);
    EXPECT_EQ(state().buffers, 0);
    EXPECT_EQ(state().pinned, 0);
    EXPECT_EQ(state().streams, 0);
    EXPECT_EQ(state().events, 0);
    EXPECT_EQ(state().libraries, 0);
    EXPECT_EQ(state().user_objects, 0);
    EXPECT_EQ(state().contexts, 0);
  }
};
[[maybe_unused]] const auto* const environment = testing::AddGlobalTestEnvironment(new FakeEnvironment);

}  // namespace
}  // namespace imbrex::cuda::fake
