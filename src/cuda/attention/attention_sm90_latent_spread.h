#pragma once
// The host side of attention_sm90_latent_spread.cu: which layers it can run, when it is the faster one, and the constants it is compiled
// with.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_sm90_latent.h"

namespace imbrex::cuda {

constexpr unsigned kSm90LatentSpreadThreads = 384;

// A form of this kernel, or of attention_sm90_latent_decode_spread.cu. With fewer dims for each thread block a task takes less time, and
// more multiprocessors.
struct Sm90LatentSpread {
  int own_dims;        // of the output, that a thread block has
  unsigned cluster;    // thread blocks, which take the rows of a task together
  int64_t most_tasks;  // of a launch: with more of them another kernel, or form, is faster
};
// The form for few tasks, or that for the fewest. It takes items of attention_sm90_latent.cu of more than 64 rows, or of more than 32
// q heads, in layers that have plain logits and no window; other layers have none, and those of other dims than 512 have one form alone.
// Layers of attention_sm90_latent_pair.cu with 512 dims have that for the fewest.
std::optional<Sm90LatentSpread> attention_sm90_latent_spread(std::string_view arch, const AttentionSpec&, Regime, bool fewest);
// Entry `attention_sm90_latent_spread`. Parameters and maps: those of attention_sm90_latent.cu, or attention_sm90_latent_pair.cu, whose
// items it takes, and whose bits it computes.
KernelKey attention_sm90_latent_spread_key(std::string_view arch, const AttentionSpec&, Regime, DType out, const Sm90LatentSpread&);

}  // namespace imbrex::cuda
