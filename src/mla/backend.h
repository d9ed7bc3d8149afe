#pragma once
// The backends of MLA that are composed of attention backends.
#include <string>
#include <string_view>
#include <vector>

#include "mla/plan.h"

namespace imbrex {

// Composed of the attention backend of the same name, which runs requests in latent space, and of the first one that runs expanded keys.
class MlaCompositeBackend final : public BackendOf<MlaFamily> {
 public:
  MlaCompositeBackend(const BackendOf<AttentionFamily>& latent, std::string_view description, const MlaHardware& hardware,
                      const MlaRates& rates)
      : latent_(latent), description_(description), hardware_(hardware), rates_(rates) {}
  std::string_view name() const override { return latent_.name(); }
  std::string_view description() const override { return description_; }
  std::vector<Reason> unsupported(const MlaSpec&, const DeviceInfo&) const override;
  std::unique_ptr<MlaPlan> plan(const MlaSpec&, const DeviceInfo&, const PlanOptions&) const override;
  int64_t workspace_bytes(const MlaSpec&, const DeviceInfo&, const PlanOptions&) const override;
  std::vector<KernelChoice> kernel_choices(const MlaSpec&, const DeviceInfo&) const override;

  // What plan() composes a plan of.
  MlaParts parts(const MlaSpec&, const DeviceInfo&, const PlanOptions&) const;

 private:
  MlaParts attention_parts(const MlaSpec&, const DeviceInfo&) const;  // without products, which only a device that is there can have
  const BackendOf<AttentionFamily>& latent_;
  std::string_view description_;
  const MlaHardware& hardware_;
  MlaRates rates_;
};

}  // namespace imbrex
