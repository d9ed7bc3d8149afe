// See backend.h.
#include "mla/backend.h"

#include <fmt/format.h>

#include <algorithm>

#include "family/begin_plan.h"
#include "mla/step.h"

namespace imbrex {

namespace {

struct Expanded {
  const BackendOf<AttentionFamily>* backend = nullptr;
  std::string rule;
};

// By the order of attention alone: a name that is forced is that of the whole, and says nothing of its members.
Expanded expanded_of(const MlaSpec& spec, const MlaHardware& hardware, const DeviceInfo& device) {
  Expanded first;
  int count = 0;
  const std::vector<AttentionSpec> rounds = hardware.rounds(spec);
  for (const BackendOf<AttentionFamily>* backend : backends<AttentionFamily>()) {
    if (!std::ranges::all_of(rounds, [&](const AttentionSpec& round) { return backend->unsupported(round, device).empty(); })) continue;
    if (count++ == 0) first.backend = backend;
  }
  first.rule = fmt::format("first of {} that run it", count);
  return first;
}

// Whether some requests may be computed with expanded keys, as far as the spec says.
bool expands(const MlaSpec& spec, const MlaHardware& hardware) { return !spec.absorbed && hardware.can_expand(spec.mask); }

}  // namespace

std::vector<Reason> MlaCompositeBackend::unsupported(const MlaSpec& spec, const DeviceInfo& device) const {
  std::vector<Reason> reasons = latent_.unsupported(spec.latent_spec(), device);
  if (!reasons.empty() || spec.absorbed) return reasons;
  reasons = hardware_.refusals(spec, device);
  if (reasons.empty() && expands(spec, hardware_) && expanded_of(spec, hardware_, device).backend == nullptr)
    reasons.push_back({"mla.expanded", "a backend that runs " + hardware_.rounds(spec).front().str(), "none"});
  return reasons;
}

MlaParts MlaCompositeBackend::attention_parts(const MlaSpec& spec, const DeviceInfo& device) const {
  MlaParts parts{
      .name = std::string(name()), .hardware = &hardware_, .latent = &latent_, .expanded = nullptr, .products = nullptr, .rates = rates_};
  if (expands(spec, hardware_)) parts.expanded = expanded_of(spec, hardware_, device).backend;
  return parts;
}

MlaParts MlaCompositeBackend::parts(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const {
  MlaParts parts = attention_parts(spec, device);
  if (spec.absorbed) return parts;
  parts.products = hardware_.products(spec, device, options);
  if (latent_type(spec, parts.products.get()) == DType::f32) parts.rates.expansion = rates_.products;
  return parts;
}

int64_t MlaCompositeBackend::workspace_bytes(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const {
  check_request(*this, spec.str(), unsupported(spec, device), device, options);
  return hardware_.workspace_bytes(spec, device, options, attention_parts(spec, device));
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
  if (!expands(spec, hardware_)) return choices;
  const Expanded expanded = expanded_of(spec, hardware_, device);
  add(*expanded.backend, hardware_.rounds(spec).front(), fmt::format("with expanded keys ({})", expanded.rule),
      hardware_.chunk_keys(spec, {}));
  return choices;
}

}  // namespace imbrex
