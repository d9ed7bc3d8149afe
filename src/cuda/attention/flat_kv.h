#pragma once
// Flat keys: those of a step's prefill requests once more, in scratch of the plan, row by row without pages and in the queries' type.
// Prefill reads a key as often as it has tiles of rows, so where pages are too small for TMA, or bytes have to be widened, it is faster to
// do that once and in front of it than in each tile. What a kernel finds there is what it would have made of the cache itself: no bit of a
// result changes.
#include <memory>
#include <string_view>

#include "attention/cut_rules.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/params.h"
#include "imbrex/batch.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

// Whether cuda_sm90's prefill would read the cache of such a layer with more than TMA.
bool flattens(const AttentionSpec&);
// The layer over its flat keys.
AttentionSpec flat_spec(const AttentionSpec&);
KernelKey flatten_kv_key(std::string_view arch, const AttentionSpec&);

// How many kv heads run() makes flat at a time in a step, and the blocks that copy them.
struct FlatStep {
  int kv_heads = 0;  // as many as there is room for; 0: it is not worth it, or there is room for none
  int blocks = 0;    // of kFlatRows rows
  int64_t rows() const { return int64_t(blocks) * kFlatRows; }
};

// The room of a plan for flat keys.
struct FlatRoom {
  int64_t most_blocks = 0;  // of a step, of kFlatRows rows; 0: no batch within the limits asks for any
  int64_t bytes = 0;        // of the heads that are flat at a time
};
// `prefill` cuts the requests whose keys these are. Heads are taken `heads_together` at a time.
FlatRoom flat_room(const AttentionSpec&, const SchedulePolicy& prefill, const PlanLimits&, int heads_together);

class FlatKv {
 public:
  // The arguments are those of flat_room(), which has to have found room.
  FlatKv(const ContextPtr&, std::string_view arch, const AttentionSpec&, const SchedulePolicy& prefill, int heads_together,
         const FlatRoom&);

  int64_t most_blocks() const { return room_.most_blocks; }
  // Pure arithmetic, as are the next three, which write FlattenKvParams' arrays.
  FlatStep plan(const Batch&) const;
  // The step that a graph can replay which is captured with the step `now`: as many kv heads at a time as `now`, or all if `now` has no
  // flat keys. No blocks: no flat keys.
  FlatStep in_graph(const FlatStep& now) const;
  FlatCounts counts_in_graph(const PlanCounts& prefill, const FlatStep&, int room) const;
  void put_starts(const Batch&, long* flat_start) const;
  void put_first_keys(const Batch&, int* first_keys) const;
  void put_requests(const Batch&, int* requests) const;
  // Whether the kernel can read such a cache.
  static bool takes(const KvCache&);
  // The heads of a step as a ragged cache in FlatRoom::bytes of memory.
  KvCache cache(char* memory, const FlatStep&, int kv_heads) const;
  // Launches the kernel that writes it. The context must be current.
  void run(const FlattenKvParams&, bool programmatic, CUstream) const;

 private:
  AttentionSpec spec_;
  CutRules rules_;
  int heads_together_;
  FlatRoom room_;
  Device device_;
  std::shared_ptr<const Module> module_;
  Kernel kernel_;
};

}  // namespace imbrex::cuda
