// See backend.h.
#include "mla/backend.h"

#include <fmt/format.h>

#include "family/begin_plan.h"
#include "mla/step.h"

namespace imbrex {

std::unique_ptr<HeadProducts> cpu_head_products(CpuIsa, const ParallelFor&);  // cpu/head_products.cpp

namespace {

struct Expanded {
  const BackendOf<AttentionFamily>* backend = nullptr;
  std::string rule;
};

// By the order of attention alone: a name that is forced is that of the whole, and says nothing of its members.
Expanded expanded_of(const MlaSpec& spec, const DeviceInfo& device) {
  Expanded first;
  int count = 0;
  for (const BackendOf<AttentionFamily>* backend : backends<AttentionFamily>()) {
    if (!backend->unsupported(rounds_spec(spec), device).empty()) continue;
    if (count++ == 0) first.backend = backend;
  }
  first.rule = fmt::format("first of {} that run it", count);
  return first;
}

}  // namespace

std::vector<Reason> MlaCompositeBackend::unsupported(const MlaSpec& spec, const DeviceInfo& device) const {
  std::vector<Reason> reasons = latent_.unsupported(spec.latent_spec(), device);
  if (!reasons.empty() || spec.absorbed || expanded_of(spec, device).backend != nullptr) return reasons;
  return {{"mla.expanded", "a backend that runs " + rounds_spec(spec).str(), "none"}};
}

MlaParts MlaCompositeBackend::parts(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const {
  MlaParts parts{.name = std::string(name()), .latent = &latent_, .expanded = nullptr, .products = nullptr, .rates = rates_};
  if (spec.absorbed) return parts;
  parts.expanded = expanded_of(spec, device).backend;
  parts.products = cpu_head_products(device.isa, options.threads);
  if (latent_type(spec, parts.products.get()) == DType::f32) parts.rates.expansion = rates_.products;
  return parts;
}

std::unique_ptr<MlaPlan> MlaCompositeBackend::plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const {
  begin_plan(*this, spec, device, options, name());
  return make_mla_plan(spec, device, options, parts(spec, device, options));
}

std::vector<KernelChoice> MlaCompositeBackend::kernel_choices(const MlaSpec& spec, const DeviceInfo& device) const {
  check_request(*this, spec.str(), unsupported(spec, device), device, {});
  std::vector<KernelChoice> choices;
  const auto add = [&](const BackendOf<AttentionFamily>& backend, const AttentionSpec& attention, const std::string& way, int64_t keys) {
    for (KernelChoice& choice : backend.kernel_choices(attention, device)) {
      choice.requests = fmt::format("{} by {}, {}", way, backend.name(), choice.requests);
      if (keys > 0) choice.sizes.push_back({"workspace_keys", keys});
      choices.push_back(std::move(choice));
    }
  };
  add(latent_, spec.latent_spec(), "in latent space", 0);
  if (spec.absorbed) return choices;
  const Expanded expanded = expanded_of(spec, device);
  add(*expanded.backend, rounds_spec(spec), fmt::format("with expanded keys ({})", expanded.rule), workspace_keys(spec, {}));
  return choices;
}

}  // namespace imbrex
