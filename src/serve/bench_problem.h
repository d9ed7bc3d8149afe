#pragma once
// The tensors of one benchmark, in the device's memory: random data, pages in shuffled order, caches written by the backend itself. Used by
// bench.cpp.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/kv_codec.h"
#include "conformance/attention/case_inputs.h"
#include "imbrex/attention.h"
#include "imbrex/device_stream.h"
#include "serve/bench.h"
#include "serve/synthetic.h"

namespace imbrex::serve {

class BenchProblem {
 public:
  BenchProblem(const BackendOf<AttentionFamily>&, const AttentionSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
               const BenchOptions&, const DeviceStream&);

  const Batch& batch() const { return batch_; }
  PlanLimits limits() const { return limits_; }
  AttentionInputs inputs(int copy) const;
  AttentionOutputs outputs() const { return {out_.view, lse_.view}; }
  int64_t cache_bytes() const { return cache_bytes_; }  // of one copy
  int kv_copies() const { return std::max(int(caches_.size()), 1); }
  // One query of the batch with one kv head and its q heads, over ragged keys; its queries run to the end of the request where later
  // keys may be seen.
  CaseInputs sample(int request, int query, int kv_head) const;
  // The outputs of that query, as run() left them.
  void actual(int request, int query, int kv_head, int num_queries, std::vector<float>& out, std::vector<float>& lse) const;
  int sample_queries(int request, int query) const;
  bool is_tree(size_t request) const;  // not a chain; then all queries are sampled together

 private:
  // Rows are stretches of one array of numbers: as good as fresh ones for timing, and quickly made wherever they are needed.
  struct Numbers {
    HostTensor host;
    DeviceTensor device;
  };
  Numbers numbers_of(DType) const;
  void make_parameters(const BenchOptions&);
  void make_tables(uint64_t seed);
  int common_keys(size_t request) const;  // whose blocks are those of request 0
  int copies_wanted(int asked) const;
  void make_rows(Side, int64_t first, const TensorView& to) const;  // of tokens or keys from `first` on: to [count, heads, dim]
  void write_caches(const BackendOf<AttentionFamily>&, const DeviceInfo&, const BenchOptions&);
  const Numbers& numbers(Side side) const { return side == Side::q ? q_numbers_ : kv_numbers_; }
  HostTensor host_keys(Side, int request, int64_t count, int head, int dim) const;  // the first of a request, of one head
  HostTensor host_rows(Side, int64_t first, int64_t count, int head, int num_heads, int dim) const;

  bool values_in_keys() const { return codec_of(spec_).values_in_keys; }
  // That new keys come in: what the cache has them in, unless it quantises them by scales of its own.
  DType new_kv_dtype() const { return codec_of(spec_).scales_inside ? spec_.new_kv_dtypes().front() : spec_.kv_dtype; }

  AttentionSpec spec_;
  std::vector<BenchRequest> requests_;
  const DeviceStream& stream_;
  Synthetic synthetic_;
  Numbers q_numbers_, kv_numbers_;
  PlanLimits limits_{.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = 1};
  std::vector<int32_t> query_start_loc_{0}, seq_lens_, positions_, draft_parents_, key_start_{0}, table_;
  std::vector<int64_t> mask_start_{0};
  int max_blocks_ = 1, common_keys_ = 0;
  int64_t num_blocks_ = 0, cache_bytes_ = 0;
  HostTensor packed_mask_;                                 // the bits of its bytes
  CaseInputs parameters_;                                  // sinks, slopes, scales, bias and mask, on the host
  std::vector<NamedTensor> mask_tensors_, score_tensors_;  // all that expressions read, on the host and on the device
  AttentionInputs inputs_;                                 // what all copies share, on the device
  std::vector<DeviceTensor> owned_;
  DeviceTensor out_, lse_;
  std::vector<KvAllocation> caches_;
  Batch batch_;
};

// Compares some queries of the batch, as run() left them, with the reference: the last of a few requests and one in the middle, over all kv
// heads in turn. Error bench.check
void check_outputs(const BackendOf<AttentionFamily>&, const BenchProblem&, const AttentionSpec&, const std::vector<BenchRequest>&,
                   BenchResult&);

}  // namespace imbrex::serve
