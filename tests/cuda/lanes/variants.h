#pragma once
// The specialisations whose texts run on the host: together every way that elements, rows and warps may take.
#include <ostream>
#include <vector>

#include "attention/cases.h"
#include "cuda/attention_sm80.h"

namespace imbrex::test {

struct Variant {
  const char* name;
  const char* arch;
  cuda::KernelPhase phase;
  int rows;  // wanted of decode
  Case c;
};

inline void PrintTo(const Variant& v, std::ostream* to) { *to << v.name; }

inline std::vector<Variant> variants() {
  using cuda::KernelPhase;
  const auto spec = [](DType q, DType kv, int dim_qk, int dim_v, int group, int block_size) {
    AttentionSpec s;
    s.num_q_heads = 2 * group, s.num_kv_heads = 2;
    s.head_dim_qk = dim_qk, s.head_dim_v = dim_v;
    s.q_dtype = q, s.kv_dtype = kv;
    s.block_size = block_size;
    return s;
  };
  const std::vector<CaseRequest> decodes{{1, 19, 0}, {1, 300, 1}, {0, 0, 2}, {1, 1, 3}, {4, 140, 4}},
      prefills{{70, 70, 0}, {3, 90, 1}, {33, 150, 2}};
  std::vector<Variant> all;
  const auto add = [&](const char* name, const char* arch, KernelPhase phase, int rows, AttentionSpec s) -> Case& {
    Case c;
    c.name = name, c.spec = s;
    c.requests = phase == KernelPhase::decode ? decodes : prefills;
    c.seed = all.size() + 1;
    c.out_dtype = all.size() % 2 == 0 ? s.out_dtypes().front() : DType::f32;
    all.push_back({name, arch, phase, rows, c});
    return all.back().c;
  };
  add("decode", "sm_90a", KernelPhase::decode, 1, spec(DType::bf16, DType::bf16, 128, 128, 4, 16)).spec.score.sinks = true;
  all.back().c.values = ValuePattern::rising;  // sums are rescaled again and again
  // Bytes, an odd number of pieces, pages that divide nothing, a power of two for each row of queries.
  Case& bytes = add("bytes", "sm_80", KernelPhase::decode, 1, spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 3));
  bytes.spec.mask.window_left = 100, bytes.scale_per_head = true;
  Case& tree = add("tree", "sm_90a", KernelPhase::decode, 32, spec(DType::f16, DType::fp8_e5m2, 64, 64, 8, 64));
  tree.spec.mask.custom = true, tree.custom = CustomPattern::tree;
  add("prefill", "sm_90a", KernelPhase::prefill, 1, spec(DType::bf16, DType::bf16, 64, 128, 2, 1)).values = ValuePattern::spike;
  // Converted on the way, rows that cannot be copied 16 bytes at a time.
  Case& strided = add("strided", "sm_120", KernelPhase::prefill, 1, spec(DType::f16, DType::bf16, 72, 40, 5, 16));
  strided.spec.score.alibi = strided.spec.score.head_scales = true, strided.spec.mask.chunk = 50, strided.order = "lbhdt";
  Case& exact = add("exact", "sm_120", KernelPhase::prefill, 1, spec(DType::f32, DType::f32, 64, 64, 1, 0));
  exact.spec.mask.causal = false, exact.spec.score.soft_cap = 20.f;
  exact.spec.score.relative_buckets = 32, exact.spec.score.relative_max_distance = 64, exact.spec.score.relative_bidirectional = true;
  // Several teams of several warps.
  add("teams", "sm_90a", KernelPhase::decode, 32, spec(DType::bf16, DType::bf16, 256, 136, 4, 32)).values = ValuePattern::rising;
  // More heads than rows, warps that share out the output's dims, keys of another type than the queries.
  add("wide", "sm_90a", KernelPhase::decode, 1, spec(DType::bf16, DType::f16, 328, 328, 71, 128)).requests = {{1, 70, 0}, {2, 35, 1}};
  // Queries in bytes, with a scale for each head.
  Case& queries = add("queries", "sm_80", KernelPhase::prefill, 1, spec(DType::fp8_e4m3, DType::fp8_e4m3, 72, 128, 3, 16));
  queries.scale_per_head = true, queries.out_dtype = DType::f16;
  return all;
}

}  // namespace imbrex::test
