#pragma once
// The host side of attention_sm90_latent_spread.cu: which layers it can run, when it is the faster one, and the constants it is compiled
// with.
#include <string_view>

#include "cuda/attention/attention_sm90_latent.h"

namespace imbrex::cuda {

constexpr unsigned kSm90LatentSpreadThreads = 384;
// With more tasks of 64 rows in a launch attention_sm90_latent.cu is faster: these are two rounds of the clusters that an H200 holds.
constexpr int kSm90LatentSpreadTasks = 62;

// Thread blocks of a cluster, which take 64 rows together. 0: the kernel does not run such layers. It takes those of
// attention_sm90_latent.cu with more than 64 q heads that have plain logits and no window.
unsigned attention_sm90_latent_spread_cluster(std::string_view arch, const AttentionSpec&);
// Entry `attention_sm90_latent_spread`. Parameters and maps: those of attention_sm90_latent.cu, whose items it takes, and whose bits it
// computes.
KernelKey attention_sm90_latent_spread_key(std::string_view arch, const AttentionSpec&, DType out);

}  // namespace imbrex::cuda
