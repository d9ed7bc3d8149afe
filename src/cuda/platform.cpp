// CUDA as a platform of devices, with its kernels around layers.
#include <mutex>
#include <optional>

#include "attention/device_operations.h"
#include "cuda/driver/capture.h"
#include "cuda/driver/open_device.h"
#include "cuda/ops/copy_blocks.h"
#include "cuda/ops/gather.h"
#include "cuda/ops/merge_results.h"
#include "gpu/device_workspace.h"

namespace imbrex {
namespace cuda {
namespace {

class CudaDevice final : public ContextDevice {
 public:
  using ContextDevice::ContextDevice;
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to, Stream stream) const override {
    const CurrentContext current(*context_);
    std::call_once(gather_once_, [&] { gather_.emplace(context_, arch_of(probe_cuda().at(size_t(context_->device())))); });
    gather_->run(from, offsets, to, cu_stream(stream));
  }
  std::shared_ptr<Workspace> make_workspace() const override {
    return std::make_shared<gpu::DeviceWorkspace>(std::make_shared<ContextDevice>(context_), context_->id());
  }
  std::shared_ptr<Workspace> make_workspace(void* memory, int64_t bytes) const override {
    return std::make_shared<gpu::DeviceWorkspace>(std::make_shared<ContextDevice>(context_), context_->id(), memory, bytes);
  }

 private:
  mutable std::once_flag gather_once_;  // loaded when it is first needed
  mutable std::optional<Gather> gather_;
};

class CudaPlatform final : public DevicePlatform, public DeviceOperations {
 public:
  std::string_view name() const override { return "cuda"; }
  std::vector<DeviceInfo> devices(std::string* why) const override { return probe_cuda(why); }
  OpenDevicePtr open(const Device& device) const override { return std::make_shared<CudaDevice>(Context::of_device(device.index)); }

  bool is_captured(const Device&, Stream stream) const override { return cuda::is_captured(cu_stream(stream)); }
  uint64_t capture_of(const Device&, Stream stream) const override { return cuda::capture_of(cu_stream(stream)); }
  void keep_for_capture(const Device& device, Stream stream, std::shared_ptr<void>&& share) const override {
    cuda::keep_for_capture(device.index, cu_stream(stream), std::move(share));
  }

  std::unique_ptr<BlockCopier> block_copier(const DeviceInfo& device) const override {
    return std::make_unique<CopyBlocks>(Context::of_device(device.device.index), arch_of(device));
  }
  std::unique_ptr<PartialMerger> partial_merger(const DeviceInfo& device) const override {
    return std::make_unique<MergeResults>(Context::of_device(device.device.index), arch_of(device));
  }
};

}  // namespace
}  // namespace cuda

std::shared_ptr<const DevicePlatform> cuda_platform() {
  static const auto* const platform = new std::shared_ptr<const DevicePlatform>(std::make_shared<cuda::CudaPlatform>());
  return *platform;
}

}  // namespace imbrex
