// The ground on a real driver: probing, memory, streams, events, modules, launches that depend on each other.
#include <chrono>
#include <cstring>

#include "cuda/driver/module.h"
#include "cuda/gpu.h"
#include "cuda/ops/copy_blocks.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

class DeviceRuntime : public test::Gpu {};

TEST_F(DeviceRuntime, TheProbeFillsEverything) {
  for (const DeviceInfo& gpu : probe_cuda()) {
    EXPECT_EQ(gpu.device.type, DeviceType::cuda);
    EXPECT_FALSE(gpu.name.empty());
    EXPECT_GE(gpu.sm, 50);
    EXPECT_GT(gpu.num_workers, 0);
    EXPECT_GT(gpu.l2_bytes, 0);
    EXPECT_GT(gpu.memory_bytes, int64_t(1) << 30);
    EXPECT_GE(gpu.max_smem_bytes, 48 << 10);
    EXPECT_TRUE(gpu.present);
  }
}

TEST_F(DeviceRuntime, DataGoesThereAndBack) {
  std::vector<int> values(1 << 20);
  for (size_t i = 0; i < values.size(); ++i) values[i] = int(i * 7);
  const DeviceBuffer a = upload(values), b(context, a.bytes());
  const Event begin(context, true), end(context, true);
  begin.record(stream.get());
  copy_on_device(b.address(), a.address(), a.bytes(), stream.get());
  fill_bytes(b.address(), 0, 4, stream.get());
  end.record(stream.get());
  PinnedBuffer pinned(context, a.bytes());
  copy_to_host(pinned.as(), b.address(), a.bytes(), stream.get());
  stream.synchronize();
  EXPECT_TRUE(end.done());
  EXPECT_GE(elapsed_ms(begin, end), 0.f);
  values[0] = 0;
  EXPECT_EQ(std::memcmp(pinned.as(), values.data(), a.bytes()), 0);
}

TEST_F(DeviceRuntime, TheCallersContextIsLeftAlone) {
  current.reset();  // nothing is current from here on
  CUcontext now = nullptr;
  check_cuda(need_driver().cuCtxGetCurrent(&now), "look");
  ASSERT_EQ(now, nullptr);
  {
    const DeviceBuffer buffer(context, 1 << 20);
    const OwnedStream another(context);
    const auto module = Module::load(context, copy_blocks_key(arch_of(device)));
    EXPECT_GT(module->kernel("copy_blocks_16").registers(), 0);
    EXPECT_EQ(module->kernel("copy_blocks_16").local_bytes(), 0);
  }
  check_cuda(need_driver().cuCtxGetCurrent(&now), "look");
  EXPECT_EQ(now, nullptr);
}

TEST_F(DeviceRuntime, MemoryThatIsNotThereIsAnError) {
  EXPECT_EQ(imbrex::test::error_code([&] { DeviceBuffer(context, size_t(1) << 50); }), "cuda.memory");
}

TEST_F(DeviceRuntime, ALoadedModuleIsThereInMilliseconds) {
  const KernelKey key = copy_blocks_key(arch_of(device));
  get_kernel(key);
  const auto begin = std::chrono::steady_clock::now();
  Module::load(context, key)->kernel("copy_blocks_16");
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  RecordProperty("load_us", int(ms * 1e3));
  EXPECT_LT(ms, 100);
}

}  // namespace
}  // namespace imbrex::cuda
