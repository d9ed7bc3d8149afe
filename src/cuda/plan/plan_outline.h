#pragma once
// The outline of a plan for softmax attention: its kernels, how it cuts, and the size of its scratch, computed before the plan is made.
// This is pure arithmetic on the spec, the device and the options, so that it works for a device that is only described.
#include <array>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/plan/plan_arrays.h"
#include "imbrex/plan.h"

namespace imbrex::cuda {

// A mask as pack_mask.cu packs it: AttentionParams::mask_bits, and what belongs to them.
struct PackedMask {
  ArrayOf<unsigned> bits, seen_tiles;
  int words = 0, seen_tile_words = 0;  // 0: no mask is packed
};

// The arrays in scratch: a launch of run() writes them and later launches of the same run() read them.
struct Scratch {
  ArrayOf<char> flat_keys;
  ArrayOf<float> partial_out, partial_state;
  std::array<ArrayOf<float>, kNumRegimes> run_sums;
  bool one_for_run_sums = false;  // regimes have theirs in the same memory
};

struct PlanOutline {
  struct OfRegime {
    RegimeKernel kernel, flat_kernel;                             // entry null, of the latter: none
    std::array<RegimeKernel, kFewTasksTables> few_tasks_kernels;  // those for fewer tasks come last; entry null: none
    Regime kernel_of = kDecode;  // whose kernel of the table `kernel` is: its own but where prefixes are shared
    SchedulePolicy policy;
    ScheduleBounds bounds;  // num_work 0: no request within the limits goes to this regime
    int row_blocks = 1;     // tiles of rows of one token
  };
  std::array<OfRegime, kNumRegimes> regimes;
  int64_t partial_rows = 0;  // the most that a batch within the limits has
  FlatRoom flat;
  PackedMask mask;  // in scratch; that of a mask_mod is the step's, in memory of its own
  Scratch scratch;
  size_t scratch_bytes = 0, step_mask_bytes = 0;

  // Whether the kernel of verify may take a step's requests of decode too, neighbours with the keys that they have in common in items of
  // them all (attention/shared_prefixes.h); and parts of merges at most.
  bool shares_prefixes = false;
  int64_t prefix_parts = 0;
  bool may_share = false;  // whether requests of a batch may share items of decode, whose kernel is then that of AttentionKernels::sharing
};

// Whether requests have several query tokens, but so few that these are a token and its drafts.
inline bool has_drafts(const PlanLimits& limits) {
  constexpr int kMost = 16;
  return limits.max_query_len > 1 && limits.max_query_len <= kMost;
}

// Query tokens of a request that may share a prefix: one tile of them.
inline int most_prefix_queries(const SchedulePolicy& verify) { return verify.max_q < verify.tile_q ? verify.max_q : verify.tile_q; }

// Whose kernel the list of shared prefixes has, which is that of verify: verify's, or for latents that of long verify, which has rows for
// more tokens. A plan that shares prefixes runs its other requests of verify with it too.
Regime prefix_kernel(const AttentionSpec&);
// What a list of shared prefixes costs beside one without, as in PrefixPolicy. Tiles of 64 rows of latents, or of 32 of bytes, take up to a
// fifth longer for a key than decode's do, where memory brings it; and an item's beginning, end and merge take about as long as 128 keys of
// it (docs/kernels/cuda_sm90_latent.md).
struct PrefixCosts {
  int most_percent, split_cost;
};
PrefixCosts prefix_costs(const AttentionSpec&);
// Whether that kernel may share the prefixes of a layer: with rows for twice as many tokens as decode's, and partial results that merge.cu
// joins. (Where a token fills a tile, reading its keys once for several tokens would not make products fewer.) Drafts may be trees: each of
// their tokens sees all keys in front of its request's tokens.
bool may_share_prefixes(const AttentionKernels&, std::string_view arch, const AttentionSpec&);

// Error plan.scratch for sizes that no memory has.
PlanOutline outline(const AttentionKernels&, const AttentionSpec&, const DeviceInfo&, const PlanOptions&);

inline int64_t blocks_of(int seq_len, int block_size) { return (int64_t(seq_len) + block_size - 1) / block_size; }

}  // namespace imbrex::cuda
