// Scratch of plans on a device that can be opened: what grows, what stays, and who may use it.
#include "gpu/device_workspace.h"

#include <gtest/gtest.h>

#include "expect_error.h"
#include "gpu/host_memory.h"

namespace imbrex::gpu {
namespace {

using imbrex::test::error_code;
using test::HostMemory;

TEST(DeviceWorkspace, WhoHasTakenMemoryKeepsIt) {
  DeviceWorkspace workspace(std::make_shared<HostMemory>(), 1);
  EXPECT_EQ(workspace.bytes(), 0);
  workspace.reserve(100);
  const std::weak_ptr<const ScratchMemory> first = workspace.memory();
  const auto taken = workspace.memory();
  workspace.reserve(50);
  EXPECT_EQ(workspace.memory(), taken) << "enough is not made again";
  workspace.reserve(200);
  EXPECT_EQ(workspace.bytes(), 200);
  EXPECT_EQ(taken->bytes, 100);
  const std::weak_ptr<const ScratchMemory> second = workspace.memory();
  workspace.reserve(300);
  EXPECT_TRUE(second.expired()) << "nobody had taken it";
  EXPECT_FALSE(first.expired());
}

TEST(DeviceWorkspace, AFailureLeavesWhatThereWas) {
  DeviceWorkspace workspace(std::make_shared<HostMemory>(), 1);
  workspace.reserve(100);
  const auto before = workspace.memory();
  EXPECT_EQ(error_code([&] { workspace.reserve(int64_t(1) << 40); }), "host.memory");
  EXPECT_EQ(workspace.memory(), before);
}

TEST(DeviceWorkspace, LentMemoryNeverGrows) {
  const auto device = std::make_shared<const HostMemory>();
  alignas(64) char memory[256];
  DeviceWorkspace workspace(device, 1, memory, sizeof memory);
  workspace.reserve(256);
  EXPECT_EQ(workspace.memory()->data.get(), memory);
  EXPECT_EQ(device->allocations, 0);
  EXPECT_EQ(error_code([&] { workspace.reserve(257); }), "workspace.room");
  EXPECT_EQ(error_code([&] { DeviceWorkspace(device, 1, memory + 8, 64); }), "workspace.memory");
  EXPECT_EQ(error_code([&] { DeviceWorkspace(device, 1, nullptr, 64); }), "workspace.memory");
}

TEST(DeviceWorkspace, IsOfOneContext) {
  const auto device = std::make_shared<const HostMemory>();
  const auto workspace = std::make_shared<DeviceWorkspace>(device, 1);
  EXPECT_EQ(workspace_for(device, 1, workspace), workspace);
  EXPECT_EQ(error_code([&] { workspace_for(device, 2, workspace); }), "backend.workspace");
  EXPECT_NE(workspace_for(device, 2, nullptr), nullptr);
}

}  // namespace
}  // namespace imbrex::gpu
