#pragma once
// The plans of MLA that all backends but the reference share: they are composed of attention in latent space, attention to expanded keys,
// and products with the weight of kv_b_proj. There is one for host memory (plan.cpp) and one for each kind of devices.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "imbrex/mla.h"
#include "mla/products.h"
#include "mla/ways.h"

namespace imbrex {

struct MlaParts;

// What a plan takes from a kind of devices.
struct MlaHardware {
  // What the kind lacks for a spec, beside attention.
  std::vector<Reason> (*refusals)(const MlaSpec&, const DeviceInfo&);
  std::unique_ptr<HeadProducts> (*products)(const MlaSpec&, const DeviceInfo&, const PlanOptions&);  // the device has to be present
  // Whether requests under such a mask can be cut into pieces, and the attention that rounds of pieces run, which a backend has to run all
  // of.
  bool (*can_expand)(const Mask&);
  std::vector<AttentionSpec> (*rounds)(const MlaSpec&);
  int (*chunk_keys)(const MlaSpec&, const PlanLimits&);  // of a request that are expanded at a time: by the spec and the limits alone
  std::unique_ptr<MlaPlan> (*plan)(const MlaSpec&, const DeviceInfo&, const PlanOptions&, MlaParts);
  int64_t (*workspace_bytes)(const MlaSpec&, const DeviceInfo&, const PlanOptions&, const MlaParts&);  // of parts without products
};

struct MlaParts {
  std::string name;                          // of the backend
  const MlaHardware* hardware;               //
  const BackendOf<AttentionFamily>* latent;  // runs latent_spec()
  const BackendOf<AttentionFamily>*
      expanded;                            // runs the hardware's rounds; null: not used, since the spec is absorbed or its mask forbids it
  std::unique_ptr<HeadProducts> products;  // null where the spec is absorbed
  MlaRates rates;
  // What tests say instead of the plan: keys of a piece; on a GPU, tokens of a slice and heads of a round (cuda/mla/outline.h); 0: the
  // plan's.
  int chunk_keys = 0, slice_tokens = 0, group_heads = 0;
  std::optional<bool> expand;  // which way all requests take

  WayRules rules() const { return {.rates = rates, .may_expand = expanded != nullptr, .expand = expand}; }
};

// The type in which latents are expanded: one that holds every number of the cache.
DType latent_type(const MlaSpec&, const HeadProducts*);

// The attention that rounds of pieces run: expanded_spec() by positions, without sinks, which belong to all pieces together.
AttentionSpec rounds_spec(const MlaSpec&);

// The plan of CPUs.
extern const MlaHardware mla_on_cpus;

// The plan of the hardware of these parts. The arguments have been checked.
std::unique_ptr<MlaPlan> make_mla_plan(const MlaSpec&, const DeviceInfo&, const PlanOptions&, MlaParts);

}  // namespace imbrex
