#pragma once
// The kernels of the short convolution as host code, behind the fake driver.
#include <string>

#include "cuda/fake/host_kernels.h"
#include "cuda/fake/texts.h"
#include "cuda/lanes/short_conv_variants.h"
#include "cuda/state/state_lists.h"

namespace imbrex::cuda::fake {

inline bool has_short_conv_texts() { return has_texts(); }

// Launches of the short convolution run this specialisation's text, until state().on_launch is another one.
inline void use_short_conv_text(const imbrex::test::ShortConvVariant& variant) {
  for (const KernelKey& key : {variant.key(), plan_state_batch_key("sm_90a")}) put_into_cache(key);
  state().param_sizes = {{"short_conv_aligned", {sizeof(ShortConvParams)}},
                         {"short_conv_unaligned", {sizeof(ShortConvParams)}},
                         {"plan_state_batch", {sizeof(PlanStateBatchParams)}},
                         {"zero_padding", {sizeof(ZeroPaddingParams)}}};
  run_texts([name = std::string(variant.name)](const Launch& launch) {
    return launch.entry + "_" + (is_of_all_layers(launch) ? "conv_lfm2" : name);
  });
}

}  // namespace imbrex::cuda::fake
