// The CUDA backends: what each refuses, and the table of kernels that it hands to the plan.
#include "imbrex/backend.h"

#include "core/check.h"
#include "cuda/attention_sm80.h"
#include "cuda/plan.h"

namespace imbrex {
namespace cuda {
namespace {

constexpr int kVerifyRows = 64;

// Where the larger tile of verify steps does not fit, decode's serves them too.
std::optional<AttentionTiles> sm80_tiles(std::string_view arch, const AttentionSpec& spec, Shape shape) {
  if (shape == kPrefill) return attention_sm80_tiles(arch, spec, KernelPhase::prefill);
  const auto larger = shape == kVerify ? attention_sm80_tiles(arch, spec, KernelPhase::decode, kVerifyRows) : std::nullopt;
  return larger ? larger : attention_sm80_tiles(arch, spec, KernelPhase::decode);
}

ShapeKernel sm80_shape(std::string_view arch, const AttentionSpec& spec, Shape shape) {
  const auto tiles = sm80_tiles(arch, spec, shape);
  return tiles ? ShapeKernel{.tile = {.rows = tiles->rows, .keys = tiles->keys}, .threads = unsigned(tiles->threads())} : ShapeKernel{};
}

KernelKey sm80_attention(std::string_view arch, const AttentionSpec& spec, Shape shape, DType out) {
  return attention_sm80_key(arch, spec, out, *sm80_tiles(arch, spec, shape));
}

}  // namespace

const AttentionKernels kernels_sm80{"cuda_sm80", "attention_sm80", sm80_shape, sm80_attention, merge_key};

}  // namespace cuda

namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const cuda::AttentionKernels& kernels, std::string_view description, int min_sm)
      : kernels_(kernels), description_(description), min_sm_(min_sm) {}
  std::string_view name() const override { return kernels_.backend; }
  std::string_view description() const override { return description_; }

  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    std::vector<Reason> reasons;
    const auto refuse = [&](std::string code, std::string wanted, std::string actual) {
      reasons.push_back({std::move(code), std::move(wanted), std::move(actual)});
    };
    const bool gpu = device.device.type == DeviceType::cuda;
    if (!gpu) {
      refuse("device.type", "cuda", to_string(device.device.type));
    } else if (device.sm < min_sm_) {
      refuse("device.sm", fmt::format("{} or more", min_sm_), fmt::format("{}", device.sm));
    }
    if (spec.kv_format != KvFormat::strided) refuse("spec.kv_format", "strided", to_string(spec.kv_format));
    if (gpu && device.sm >= min_sm_ && !has_shapes(spec, device)) {
      refuse("spec.head_dim_qk",
             fmt::format("dimensions of which {} tiles fit {} KiB of shared memory", to_string(spec.q_dtype), device.max_smem_bytes >> 10),
             spec.head_dim_qk == spec.head_dim_v ? fmt::format("{}", spec.head_dim_qk)
                                                 : fmt::format("{} and {}", spec.head_dim_qk, spec.head_dim_v));
    }
    return reasons;
  }

  std::unique_ptr<Plan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    spec.validate();
    const std::vector<Reason> reasons = unsupported(spec, device);
    check(reasons.empty(), "backend.unsupported", "{} cannot run {}: {}", name(), spec.str(), reasons.empty() ? "" : reasons[0].str());
    check(device.present, "backend.device_absent", "{} cannot make a runnable plan for {}, which is only described", name(), device.name);
    return std::make_unique<cuda::Plan>(kernels_, spec, device, options);
  }

 private:
  bool has_shapes(const AttentionSpec& spec, const DeviceInfo& device) const {
    const std::string arch = cuda::arch_of(device);
    for (const cuda::Shape shape : cuda::kShapes)
      if (kernels_.shape(arch, spec, shape).tile.rows == 0) return false;
    return true;
  }

  const cuda::AttentionKernels& kernels_;
  std::string_view description_;
  int min_sm_;
};

}  // namespace

const Backend& cuda_sm80() {
  static const CudaBackend backend(cuda::kernels_sm80, "tensor-core products (mma.sync) on every NVIDIA GPU since Ampere", 80);
  return backend;
}

}  // namespace imbrex
