#pragma once
// The scratch of a plan of latent attention on a GPU: pure arithmetic on the spec, the limits of a step's tokens and the keys of a round.
#include <cstdint>

#include "imbrex/mla.h"

namespace imbrex::cuda {

// Places in one piece of memory. Those of the two ways lie in the same place, since one computes after the other.
struct MlaDeviceScratch {
  int64_t products = 0;                                  // memory of the products
  int64_t latent_q = 0, latent_out = 0, latent_lse = 0;  // rows are tokens of the requests in latent space
  int64_t nope = 0, out = 0;                             // queries and outputs of such rows, each in the place of what is not there then
  int64_t latents = 0, k = 0, v = 0;                     // rows are keys of a round
  int64_t q = 0, part_out = 0, part_lse = 0, sum_out = 0, sum_lse = 0;  // rows are those of a round; of sums, tokens of the batch
  int64_t bytes = 0;
};

// Error mla.scratch for sizes that no memory has.
MlaDeviceScratch mla_scratch(const MlaSpec&, int64_t tokens, int64_t keys, bool may_expand);

}  // namespace imbrex::cuda
