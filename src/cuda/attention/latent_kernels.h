#pragma once
// Which of the kernels for latents of many dims (attention_sm90_latent*.cu) runs a regime of a layer.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_kernels.h"

namespace imbrex::cuda {

// Whether they run the layer.
bool runs_sm90_latents(std::string_view arch, const AttentionSpec&);
// nullopt: none of them runs the layer. `maps`: whether it reads through tensor maps; otherwise it reads tensors of any strides.
std::optional<RegimeKernel> sm90_latent_kernel(std::string_view arch, const AttentionSpec&, Regime);
std::optional<KernelKey> sm90_latent_attention(std::string_view arch, const AttentionSpec&, Regime, DType out, bool maps);
// Where there are few tasks, or the fewest; no entry where there is no such kernel.
RegimeKernel sm90_few_tasks_kernel(std::string_view arch, const AttentionSpec&, Regime, bool fewest);
KernelKey sm90_few_tasks_attention(std::string_view arch, const AttentionSpec&, Regime, DType out, bool fewest);

}  // namespace imbrex::cuda
