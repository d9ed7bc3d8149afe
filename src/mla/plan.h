#pragma once
// The plan of MLA that all backends but the reference share: it is composed of attention in latent space, attention to expanded keys, and
// products with the weight of kv_b_proj. Those are all that it knows of a device.
#include <memory>
#include <optional>
#include <string>

#include "imbrex/mla.h"
#include "mla/cost.h"
#include "mla/products.h"

namespace imbrex {

struct MlaParts {
  std::string name;                            // of the backend
  const BackendOf<AttentionFamily>* latent;    // runs latent_spec()
  const BackendOf<AttentionFamily>* expanded;  // runs rounds_spec(); not used where the spec is absorbed
  std::unique_ptr<HeadProducts> products;      // likewise
  MlaRates rates;
  int chunk_keys = 0;          // of a piece; 0: workspace_keys()
  std::optional<bool> expand;  // which way all requests take, where tests say it
};

// The type in which latents are expanded: one that holds every number of the cache.
DType latent_type(const MlaSpec&, const HeadProducts*);

// The attention that rounds of pieces run: expanded_spec() by positions, without sinks, which belong to all pieces together.
AttentionSpec rounds_spec(const MlaSpec&);

// How many keys are expanded at a time: as many as fit kExpandedBytes. It depends on the spec and the limits alone.
int workspace_keys(const MlaSpec&, const PlanLimits&);

// Only for host memory, so far. The arguments have been checked.
std::unique_ptr<MlaPlan> make_mla_plan(const MlaSpec&, const DeviceInfo&, const PlanOptions&, MlaParts);

}  // namespace imbrex
