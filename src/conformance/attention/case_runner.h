#pragma once
// Runs one case through one backend the way a server would: poisoned pages in shuffled order, keys written by the backend itself.
// Used by the conformance tests, `imbrex verify` and the bench.
#include <string>
#include <vector>

#include "conformance/attention/case_inputs.h"
#include "conformance/error_stats.h"
#include "conformance/poison.h"
#include "imbrex/attention.h"

namespace imbrex {

// How a case is run; none of it may change the result.
struct RunOptions {
  KvFormat kv_format = KvFormat::strided;
  int block_size = 16;          // 0: ragged
  bool csr = false;             // kv_indptr and kv_indices instead of a dense table
  std::string order = "lbhtd";  // of the cache
  uint64_t page_seed = 1;       // order in which pages are handed out
  Poison poison = Poison::nan;
  int padding_tokens = 2;        // rows after the batch's tokens
  DType out_dtype = DType::f32;  // one of spec.out_dtypes()
  int chunk = 0;                 // > 0: a request's queries are run in steps of so many (causal cases without trees only)
  ParallelFor threads;
  bool share_blocks = false;  // requests of one id have their context's blocks in common (plain values only: others depend on seq_len)
  bool balanced = false;      // split by load: the one option that may change roundings
  bool packed_mask = false;   // a custom mask has a bit for each query and key; with csr, gaps between requests
  bool check_cache = true;    // compare what write_kv wrote with what the reference writes
};
RunOptions default_options(const Case&);

// Whether a cache of the format holds the numbers of a case with such a spec: formats with scales of their own have numbers of their own.
bool holds(KvFormat, const AttentionSpec& of_case);

struct RunResult {
  std::vector<float> out;               // [T, num_q_heads, head_dim_v]
  std::vector<float> lse;               // [T, num_q_heads]
  std::vector<std::string> violations;  // bytes written that are not the request's, cache contents that differ
};

// The spec as this run has it: the case's, with format and block size of the options.
AttentionSpec run_spec(const CaseInputs&, const RunOptions&);
RunResult run_case(const BackendOf<AttentionFamily>&, const DeviceInfo&, const CaseInputs&, const RunOptions&);

}  // namespace imbrex
