#pragma once
// The outline of a plan of latent attention on a GPU: how much of a step it computes at a time, and the size of its scratch, so that all of
// it stays within a fixed number of bytes however long a step and its requests are. Pure arithmetic on the spec, the device and the
// options, so that it works for a device that is only described.
#include <cstdint>
#include <vector>

#include "cuda/mla/rounds.h"
#include "imbrex/mla.h"
#include "mla/plan.h"

namespace imbrex::cuda {

// Places in the workspace, behind the scratch of the plans of attention. Those of the two ways are the same, since one computes after the
// other.
struct MlaDeviceScratch {
  int64_t products = 0;                                  // memory of the products
  int64_t latent_q = 0, latent_out = 0, latent_lse = 0;  // rows are tokens of a slice in latent space
  int64_t nope = 0, out = 0;                             // queries and outputs of such rows, each in the place of what is not there then
  int64_t latents = 0, k = 0, v = 0;                     // rows are keys of a round
  int64_t q = 0, part_out = 0, part_lse = 0, sum_out = 0, sum_lse = 0;  // rows are those of a round; of sums, tokens of its slice
  int64_t end = 0;
};

struct MlaOutline {
  bool may_expand = false;   // some request within the limits
  int latent_tokens = 0;     // of a slice in latent space
  size_t latent_slices = 0;  // that a step has at most
  // Requests with expanded keys have the first shape that holds all of their queries and, of a whole one, keys, or else the last one: the
  // choice depends on the request alone. The whole shapes come first, by falling numbers of heads and rising numbers of keys, then others
  // by rising numbers of queries.
  std::vector<RoundShape> shapes;
  std::vector<MlaDeviceScratch> rounds;  // of each shape
  MlaDeviceScratch latent;
  int64_t bytes = 0;  // of the workspace

  size_t shape_of(int queries, int keys) const;
};

// Error mla.scratch for sizes that no memory has.
MlaOutline outline(const MlaSpec&, const DeviceInfo&, const PlanOptions&, const MlaParts&);

// The options of the plans of attention: that of a slice in latent space, and those of rounds of a shape. Both compute in the workspace of
// the options.
PlanOptions latent_member(const MlaSpec&, const PlanOptions&, const MlaOutline&);
PlanOptions round_member(const PlanOptions&, const RoundShape&);
// The layer that a round of a shape computes.
MlaSpec of_heads(const MlaSpec&, int heads);

// Keys of a request in a round at most, where these are not said (MlaParts::chunk_keys).
int device_chunk_keys(const MlaSpec&, const PlanLimits&);
// Query tokens of a request at most.
int most_query_len(const PlanLimits&);

}  // namespace imbrex::cuda
