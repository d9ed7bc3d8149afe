#pragma once
// The kernels of latent attention's plan as host code, behind the fake driver: those between its parts, and the one that plans from lengths
// on the device, are their texts, attention and products are plain loops.
#include <algorithm>
#include <string>
#include <vector>

#include "cuda/fake/host_kernels.h"
#include "cuda/fake/texts.h"
#include "cuda/lanes/mla_variants.h"
#include "cuda/mla/rounds.h"

namespace imbrex::cuda::fake {

inline bool has_mla_texts() { return has_texts(); }

// The library of gather_latents.cu for a spec's types; empty: there is none, and no keys can be expanded.
inline std::string gather_variant_of(const MlaSpec& spec) {
  for (const imbrex::test::MlaVariant& v : imbrex::test::mla_variants())
    if (v.runs(spec)) return v.name;
  return {};
}

// Launches of plans of this spec compute, until state().on_launch is another one.
inline void use_mla_texts(const MlaSpec& spec) {
  std::vector<AttentionSpec> specs{spec.latent_spec()};
  if (!spec.absorbed && can_expand_on_device(spec.mask))
    for (const AttentionSpec& round : round_specs(spec)) specs.push_back(round);
  run_on_host(specs);
  for (const KernelKey& key : {gather_latents_key("sm_90a", spec), copy_rows_key("sm_90a"), add_parts_key("sm_90a")}) put_into_cache(key);
  auto& sizes = state().param_sizes;
  sizes["gather_latents_aligned"] = sizes["gather_latents_unaligned"] = {sizeof(GatherLatentsParams)};
  sizes["copy_rows_16"] = sizes["copy_rows_2"] = {sizeof(CopyRowsParams)};
  sizes["add_parts"] = {sizeof(AddPartsParams)};
#ifdef IMBREX_LANES
  state().on_launch = [others = state().on_launch, variant = gather_variant_of(spec)](const Launch& launch) {
    const bool gathers = launch.entry.starts_with("gather_latents");
    const bool plans = launch.entry == "plan_batch";
    if (!gathers && !plans && !launch.entry.starts_with("copy_rows") && launch.entry != "add_parts") return others(launch);
    const std::string name = launch.entry + "_" + (gathers ? variant : plans ? "decode" : "latents_bf16");
    run_text(name, launch, std::min(launch.grid_x, 3u));
  };
#endif
}

}  // namespace imbrex::cuda::fake
