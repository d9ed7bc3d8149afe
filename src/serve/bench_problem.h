#pragma once
// The tensors of one benchmark: random data, pages in shuffled order, caches written by the backend itself. Used by bench.cpp.
#include <cstdint>
#include <vector>

#include "attention/case_inputs.h"
#include "imbrex/backend.h"
#include "serve/bench.h"

namespace imbrex::serve {

class BenchProblem {
 public:
  BenchProblem(const Backend&, const AttentionSpec&, const DeviceInfo&, const std::vector<BenchRequest>&, const BenchOptions&);

  const Batch& batch() const { return batch_; }
  PlanLimits limits() const { return limits_; }
  Inputs inputs(int copy) const;
  Outputs outputs() const { return {out_.view(), lse_.view()}; }
  int64_t cache_bytes() const { return cache_bytes_; }
  // One query of the batch with one kv head and its q heads, over ragged keys; its queries run to the end of the request where later
  // keys may be seen.
  CaseInputs sample(int request, int query, int kv_head) const;
  // The outputs of that query, as run() left them.
  void actual(int request, int query, int kv_head, int num_queries, std::vector<float>& out, std::vector<float>& lse) const;
  int sample_queries(int request, int query) const;

 private:
  void make_tables(uint64_t seed);
  void write_caches(const Backend&, const DeviceInfo&, const BenchOptions&);

  AttentionSpec spec_;
  std::vector<BenchRequest> requests_;
  PlanLimits limits_;
  std::vector<int32_t> query_start_loc_{0}, seq_lens_, key_start_{0}, table_;
  std::vector<int64_t> slots_, mask_start_{0};
  int max_blocks_ = 1;
  int64_t num_blocks_ = 0, cache_bytes_ = 0;
  HostTensor q_, k_, v_, out_, lse_, sinks_, alibi_slopes_, head_scales_, relative_bias_, custom_mask_;
  std::vector<KvAllocation> caches_;
  Batch batch_;
};

}  // namespace imbrex::serve
