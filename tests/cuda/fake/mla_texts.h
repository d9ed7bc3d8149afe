#pragma once
// The kernels of latent attention's plan as host code, behind the fake driver: those between its parts, and the one that plans from lengths
// on the device, are their texts, attention and products are plain loops.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/lanes/mla_variants.h"
#include "cuda/mla/rounds.h"
#ifdef IMBREX_LANES
#include "cuda/lanes/library.h"
#endif

namespace imbrex::cuda::fake {

// Whether kernels compute: builds with sanitizers have no libraries of kernels for the host.
inline bool has_mla_texts() {
#ifdef IMBREX_LANES
  return true;
#else
  return false;
#endif
}

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
    static std::map<std::string, imbrex::test::Library> libraries;
    const bool gathers = launch.entry.starts_with("gather_latents");
    const bool plans = launch.entry == "plan_batch";
    if (!gathers && !plans && !launch.entry.starts_with("copy_rows") && launch.entry != "add_parts") return others(launch);
    const std::string name = launch.entry + "_" + (gathers ? variant : plans ? "decode" : "latents_bf16");
    if (!libraries.contains(name)) libraries[name] = imbrex::test::open_library(name);
    libraries[name].run(launch.all_params.at(0).data(), nullptr, {.blocks = int(std::min(launch.grid_x, 3u))});
  };
#endif
}

inline void forget_texts() { state().on_launch = nullptr, state().param_sizes.clear(), state().launches.clear(); }

}  // namespace imbrex::cuda::fake
