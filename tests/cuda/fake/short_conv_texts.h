#pragma once
// The kernels of the short convolution as host code, behind the fake driver.
#include <map>
#include <string>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "cuda/lanes/short_conv_variants.h"
#include "cuda/state/state_lists.h"
#ifdef IMBREX_LANES
#include "cuda/lanes/library.h"
#endif

namespace imbrex::cuda::fake {

// Whether kernels compute: builds with sanitizers have no libraries of kernels for the host.
inline bool has_short_conv_texts() {
#ifdef IMBREX_LANES
  return true;
#else
  return false;
#endif
}

// Launches of the short convolution run this specialisation's text, until state().on_launch is another one.
inline void use_short_conv_text(const imbrex::test::ShortConvVariant& variant) {
  for (const KernelKey& key : {variant.key(), plan_state_batch_key("sm_90a")}) put_into_cache(key);
  state().param_sizes = {{"short_conv_aligned", {sizeof(ShortConvParams)}},
                         {"short_conv_unaligned", {sizeof(ShortConvParams)}},
                         {"plan_state_batch", {sizeof(PlanStateBatchParams)}}};
#ifdef IMBREX_LANES
  state().on_launch = [name = std::string(variant.name)](const Launch& launch) {
    static std::map<std::string, imbrex::test::Library> libraries;
    const std::string text = launch.entry + "_" + (launch.entry == "plan_state_batch" ? "conv_lfm2" : name);
    if (!libraries.contains(text)) libraries[text] = imbrex::test::open_library(text);
    static unsigned chance = 0;
    libraries[text].run(launch.all_params.at(0).data(), nullptr,
                        {.blocks = int(launch.grid_x), .late_copies = chance % 2 == 0, .chance = chance});
    ++chance;
  };
#endif
}

}  // namespace imbrex::cuda::fake
