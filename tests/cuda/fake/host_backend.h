#pragma once
// A CUDA backend whose kernels are host code.
#include "cuda/fake/host_kernels.h"
#include "imbrex/backend.h"
#include "imbrex/select.h"

namespace imbrex::cuda {

struct HostBackend : Backend {
  explicit HostBackend(std::string_view name) : inner(*find_backend(name)) {}
  const Backend& inner;
  std::string_view name() const override { return inner.name(); }
  std::string_view description() const override { return inner.description(); }
  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    return inner.unsupported(spec, device);
  }
  std::unique_ptr<imbrex::Plan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    fake::run_on_host(spec);
    return inner.plan(spec, device, options);
  }
};

}  // namespace imbrex::cuda
