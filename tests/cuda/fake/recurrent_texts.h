#pragma once
// The kernels of recurrent layers as host code, behind the fake driver.
#include <string>

#include "cuda/fake/host_kernels.h"
#include "cuda/fake/texts.h"
#include "cuda/lanes/recurrent_variants.h"
#include "cuda/state/state_lists.h"

namespace imbrex::cuda::fake {

// Launches of recurrent layers run this specialisation's text, until state().on_launch is another one.
inline void use_recurrent_text(const imbrex::test::RecurrentVariant& variant) {
  for (const KernelKey& key : {variant.key(), plan_state_batch_key(variant.arch())}) put_into_cache(key);
  const RecurrentKernel kernel = recurrent_kernel(variant.arch(), variant.layer);
  state().param_sizes = {{kernel.aligned, {sizeof(RecurrentParams)}},
                         {kernel.unaligned, {sizeof(RecurrentParams)}},
                         {"plan_state_batch", {sizeof(PlanStateBatchParams)}},
                         {"zero_padding", {sizeof(ZeroPaddingParams)}}};
  if (const auto stream = variant.stream_kernel()) {
    put_into_cache(stream->key);
    state().param_sizes["recurrent_stream"] = {sizeof(RecurrentParams)};
  }
  if (const auto prompts = variant.prompt_kernel()) {
    put_into_cache(prompts->key);
    state().param_sizes["recurrent_narrow_prompts"] = {sizeof(RecurrentParams)};
  }
  if (const auto outputs = variant.output_kernel()) {
    put_into_cache(outputs->key);
    for (const char* entry : {"recurrent_outputs_aligned", "recurrent_outputs_unaligned"})
      state().param_sizes[entry] = {sizeof(RecurrentOutputParams)};
  }
  if (const auto chunks = variant.chunks()) {
    for (const KernelKey& key : {chunks->weights, chunks->chunks}) put_into_cache(key);
    if (chunks->most_segments > 1) put_into_cache(chunks->ends), put_into_cache(chunks->segments);
    std::vector<size_t>& sizes = state().param_sizes["recurrent_chunks"];
    state().param_sizes[chunks->weights_entry] = state().param_sizes["recurrent_segments"] = sizes = {sizeof(RecurrentParams)};
    if (chunks->maps) sizes.insert(sizes.end(), 4, sizeof(CUtensorMap));
  }
  const std::string ends = variant.chunks() ? variant.chunks()->ends.str() : "";
  run_texts(
      [name = std::string(variant.name), tokens = variant.tokens(), ends, outputs = std::string(variant.outputs)](const Launch& launch) {
        if (launch.entry.starts_with("recurrent_outputs")) return launch.entry + "_" + outputs;
        if (launch.entry == "recurrent_narrow_prompts") return launch.entry + "_prompts_" + name;
        if (launch.entry.ends_with("_weights")) return launch.entry + "_weights_" + name;
        if (launch.entry == "recurrent_chunks") return launch.entry + (launch.module == ends ? "_ends_" : "_chunks_") + name;
        if (launch.entry == "recurrent_segments") return launch.entry + "_segments_" + name;
        return launch.entry + "_" + (is_of_all_layers(launch) ? "conv_lfm2" : tokens);
      });
}

}  // namespace imbrex::cuda::fake
