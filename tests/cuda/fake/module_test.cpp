// Modules are loaded once and unloaded with their last user; launches pass shape, shared memory and attributes on. On the fake driver.
#include "cuda/driver/module.h"

#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/tiny_elf.h"
#include "expect_error.h"
#include "gpu/kernel_cache.h"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code;

// A key whose cubin lies in the cache, so that nothing has to be compiled.
KernelKey cached_key(int number, const std::vector<std::pair<std::string, unsigned>>& constants = {}) {
  const KernelKey key{"test.cu", "sm_90a", {{"kNumber", number}}};
  EXPECT_TRUE(gpu::store_cached(gpu::kernel_cache_folder(), cache_name(key), {.binary = test::tiny_elf(constants), .log = ""}));
  return key;
}

TEST(Module, IsSharedWhileSomebodyHoldsIt) {
  const auto context = Context::of_device(0), other = Context::of_device(1);
  const KernelKey key = cached_key(1), second = cached_key(2);
  const int loads = state().library_loads;
  auto a = Module::load(context, key), b = Module::load(context, key);
  EXPECT_EQ(a, b);
  EXPECT_EQ(state().library_loads, loads + 1);
  const auto elsewhere = Module::load(other, key), different = Module::load(context, second);
  EXPECT_NE(elsewhere, a);
  EXPECT_NE(different, a);
  EXPECT_EQ(state().libraries, 3);
  a.reset();
  EXPECT_EQ(state().libraries, 3);
  b.reset();
  EXPECT_EQ(state().libraries, 2);
  a = Module::load(context, key);
  EXPECT_EQ(state().library_loads, loads + 4) << "it was unloaded in between";
}

TEST(Module, AnotherContextAtTheSameAddressIsAnotherOne) {
  const KernelKey key = cached_key(3);
  auto context = Context::of_device(0);
  const auto id = context->id();
  auto module = Module::load(context, key);
  context.reset();
  EXPECT_EQ(module->context()->id(), id) << "the module keeps its context";
  module.reset();
  EXPECT_EQ(state().contexts, 0);
  EXPECT_NE(Context::of_device(0)->id(), id);
}

TEST(Module, FailuresLeaveNothingBehind) {
  const auto context = Context::of_device(0);
  state().fail_next = kCudaInvalidValue;
  EXPECT_EQ(error_code([&] { Module::load(context, cached_key(4)); }), "cuda.driver");
  EXPECT_EQ(state().libraries, 0);
  const auto module = Module::load(context, cached_key(4));
  EXPECT_EQ(error_code([&] { module->kernel("absent"); }), "cuda.entry");
}

TEST(Kernel, SharedMemoryIsWhatTheCubinSays) {
  const auto context = Context::of_device(0);
  const auto module = Module::load(context, cached_key(5, {{"smem_bytes", 100 << 10}, {"small_smem_bytes", 48 << 10}}));
  EXPECT_EQ(module->kernel("large").smem_bytes(), 100u << 10);
  EXPECT_EQ(module->kernel("small").smem_bytes(), 48u << 10);
  EXPECT_EQ(state().max_dynamic_smem.count("small"), 0u) << "that much is there without asking";
  EXPECT_EQ(state().max_dynamic_smem["large"], 100 << 10);
  EXPECT_EQ(module->kernel("large").registers(), 40);
  EXPECT_EQ(module->kernel("large").blocks_per_multiprocessor(128), 16);
}

TEST(Kernel, LaunchesPassEverythingOn) {
  const auto context = Context::of_device(0);
  const CurrentContext scope(*context);
  const auto module = Module::load(context, cached_key(6, {{"smem_bytes", 1234}}));
  const Kernel kernel = module->kernel("entry");
  const OwnedStream stream(context);
  struct Params {
    int a;
    long b;
  } const params{7, 8};
  state().params_bytes = sizeof params;
  state().launches.clear();
  kernel.launch({.grid_x = 3, .grid_y = 4, .grid_z = 5, .threads = 256}, stream.get(), params, 1.5f);
  kernel.launch({.grid_x = 8, .threads = 384, .cluster = 2, .programmatic = true}, nullptr, params);
  kernel.launch({.programmatic = true}, nullptr, params);
  ASSERT_EQ(state().launches.size(), 3u);
  const fake::Launch &plain = state().launches[0], &both = state().launches[1], &dependent = state().launches[2];
  EXPECT_EQ(plain.entry, "entry");
  EXPECT_EQ(std::tuple(plain.grid_x, plain.grid_y, plain.grid_z, plain.threads, plain.smem_bytes), std::tuple(3u, 4u, 5u, 256u, 1234u));
  EXPECT_EQ(plain.stream, stream.get());
  EXPECT_EQ(plain.cluster, 1u);
  EXPECT_FALSE(plain.programmatic);
  EXPECT_EQ(std::memcmp(plain.params.data(), &params, sizeof params), 0);
  EXPECT_EQ(std::tuple(both.grid_x, both.threads, both.cluster, both.programmatic, both.smem_bytes), std::tuple(8u, 384u, 2u, true, 1234u));
  EXPECT_EQ(std::tuple(dependent.cluster, dependent.programmatic), std::tuple(1u, true));

  state().fail_next = kCudaInvalidValue;
  try {
    kernel.launch({.grid_x = 9}, nullptr, params);
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), "cuda.driver");
    EXPECT_NE(std::string(error.what()).find("launch entry with 9 x 1 x 1 blocks of 128 threads"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace imbrex::cuda
